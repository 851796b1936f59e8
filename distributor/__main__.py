"""Entry point of ``distributor`` and ``python -m distributor``, and the file that spark-submit starts."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Start the command line, or say in one sentence why this Python or platform cannot run it."""
    import distributor

    problem = distributor._unfit()
    if problem is not None:
        print(f"distributor: {problem}", file=sys.stderr)
        sys.exit(2)
    from distributor.cli.command import start

    start()


if __name__ == "__main__":
    if not __package__:  # run as a file: Python has put this folder on the path, but its modules are not top-level
        del sys.path[0]
    main()
