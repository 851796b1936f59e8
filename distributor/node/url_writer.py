"""Access to an ``output_dir`` at a URL, in a separate process.

A package for the URL, such as s3fs, may hang, or start threads, which would make it unsafe to fork the agent.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from distributor.errors import StartError
from distributor.machine import bootstrap
from distributor.machine.storage import Url
from distributor.values.environment import NODE_ID

_ASKED = 2  # tries of a call, each with a new process


@dataclass(frozen=True)
class _Call:
    """A call of a method of :class:`Url`."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Answer:
    """What a call has returned, or the text of its ``OSError``."""

    value: Any = None
    error: str | None = None


class UrlWriter:
    """A folder at a URL, like :class:`Url`, accessed by a process that is started when needed. All methods block.

    The process ends with the attempt, like all that the agent has started, and is started again when needed later.
    """

    def __init__(self, root: str, url: str, environ: Mapping[str, str]) -> None:
        self._root = root
        self._url = url
        self._environ = {name: value for name, value in environ.items() if name != NODE_ID}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, mark: str, own: str) -> None:
        """Check that the URL leads to the driver's ``output_dir``, and this node can write there; StartError if not.

        ``mark`` is a file that the driver has written there, ``own`` one that this node writes and removes.
        """
        try:
            if self._call("size", mark) is None:
                raise OSError(
                    "the file that the driver has written to this URL is missing. Pass a URL that leads to the same "
                    "place from the driver and from executors"
                )
            self._call("check", own)
        except OSError as error:
            raise StartError(f"output_dir {self._url!r} cannot be used on this node: {error}") from None

    def sizes(self) -> dict[str, int]:
        """Return the size of each file, by name."""
        found: dict[str, int] = self._call("sizes")
        return found

    def put(self, source: str, name: str) -> None:
        self._call("put", source, name)

    def move(self, source: str, name: str) -> None:
        """Rename a file, replacing any other."""
        self._call("move", source, name)

    def get(self, name: str, target: str) -> None:
        self._call("get", name, target)

    def remove(self, name: str) -> None:
        self._call("remove", name)

    def close(self) -> None:
        """Kill the process, even during an upload."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _call(self, method: str, *arguments: Any) -> Any:
        for _ in range(_ASKED):
            try:
                return self._ask(_Call(method, arguments))
            except (BrokenPipeError, EOFError):
                self._end()
        raise OSError("the process that accesses the URL has ended")

    def _ask(self, call: _Call) -> Any:
        if self._process is None:
            if self._closed:
                raise OSError("the run has ended")
            self._process = self._begin()
        assert self._process.stdin is not None
        pickle.dump(call, self._process.stdin)
        self._process.stdin.flush()
        return self._answer(self._process)

    def _begin(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            bootstrap.command(self._root, "uploads", self._url),
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._answer(process)  # returns once the process has opened the URL
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()
            self._process = None

    @staticmethod
    def _answer(process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout is not None
        answer: _Answer = pickle.load(process.stdout)
        if answer.error is not None:
            raise OSError(answer.error)
        return answer.value


def main(url: str) -> None:
    """Access ``url`` as the agent asks on standard input, until the agent closes it or ends (entry point)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends this process, even on a machine that shuts down
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of packages must not come between answers
    try:
        storage = Url(url)
    except OSError as error:
        _send(answers, _Answer(error=str(error)))
        return
    _send(answers, _Answer())
    while True:
        try:
            call: _Call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _send(answers, _Answer(getattr(storage, call.method)(*call.arguments)))
        except OSError as error:
            _send(answers, _Answer(error=error.strerror or str(error)))


def _send(answers: IO[bytes], answer: _Answer) -> None:
    pickle.dump(answer, answers)
    answers.flush()
