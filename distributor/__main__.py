"""The commands ``distributor`` and ``python -m distributor``, and the file that spark-submit starts."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Start the command line, unless this Python or platform cannot run it: that is said in a sentence."""
    import distributor

    problem = distributor._unfit()
    if problem is not None:
        print(f"distributor: {problem}", file=sys.stderr)
        sys.exit(2)
    from distributor.cli.command import start

    start()


if __name__ == "__main__":
    if not __package__:  # started as a file: its folder is on the path, and its modules are not top-level ones
        del sys.path[0]
    main()
