"""The ranks' output on the driver: whole lines, each with its rank and host."""

from __future__ import annotations

import sys
from collections.abc import Callable

from distributor.channel.frames import Log


class Console:
    """Puts pieces of output together into lines and prints them, stdout to stdout and stderr to stderr.

    Args:
        host_of: the host of a rank, for the prefix.
    """

    def __init__(self, host_of: Callable[[int], str]) -> None:
        self._host_of = host_of
        self._partial: dict[tuple[int, int], bytearray] = {}

    def write(self, log: Log) -> None:
        """Prints the lines that a piece completes."""
        key = (log.rank, log.stream)
        ended, newline, rest = log.data.rpartition(b"\n")
        partial = self._partial.setdefault(key, bytearray())
        if newline:
            partial += ended
            self._print(key, bytes(partial).split(b"\n"))
            partial.clear()
        partial += rest

    def flush(self) -> None:
        """Prints what was not ended by a newline."""
        for key, rest in sorted(self._partial.items()):
            if rest:
                self._print(key, [bytes(rest)])
        self._partial.clear()

    def _print(self, key: tuple[int, int], lines: list[bytes]) -> None:
        out = sys.stdout if key[1] == 1 else sys.stderr
        if out is None:  # Python has no output where the shell closed it
            return
        prefix = f"[rank {key[0]} {self._host_of(key[0])}] "
        text = "".join(f"{prefix}{line.decode(errors='replace')}\n" for line in lines)
        try:
            encoding = getattr(out, "encoding", None) or "utf-8"
            out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            out.flush()
        except Exception:  # a closed, full or odd output must not end the run
            pass
