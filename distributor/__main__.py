"""``python -m distributor``, and what spark-submit starts (``distributor script-path``)."""

import sys

if __name__ == "__main__":
    if not __package__:  # started as a file: its folder is on the path, and its modules are not top-level ones
        del sys.path[0]
    from distributor.cli import start

    start()
