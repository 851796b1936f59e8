"""Entry point of ``distributor`` and ``python -m distributor``, and the file that spark-submit starts."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Start the command line, or print one sentence that says why this Python or platform cannot run the package."""
    import distributor

    problem = distributor._unfit()
    if problem is not None:
        print(f"distributor: {problem}", file=sys.stderr)
        sys.exit(2)
    from distributor.cli.command import start

    start()


if __name__ == "__main__":
    # If this file is run as a script, Python puts its folder first in sys.path. The package's own modules, such as
    # errors.py, would then hide other top-level modules of the same name.
    if not __package__:
        del sys.path[0]
    main()
