"""Access an ``output_dir`` at a URL in a separate process.

The agent does not import the package that accesses the URL, such as s3fs. Such a package may hang, and may start
threads, which would make it unsafe to fork the agent.
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
from distributor.machine.urls import Remote
from distributor.values.environment import NODE_ID

#: Number of times that a call is tried. Each try after the first starts a new process.
_ASKED = 2


@dataclass(frozen=True)
class _Call:
    """A call of a method of :class:`Remote`, to be made in the separate process that accesses the URL."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Answer:
    """What a call of a method of :class:`Remote` has returned, or the text of the ``OSError`` that it has raised."""

    value: Any = None
    error: str | None = None


class Uploads:
    """A folder at a URL, like :class:`Remote`, but accessed by a separate process. All methods block.

    The process that accesses the URL is started when it is first needed. Like all processes that the agent has started,
    it ends with the attempt. If it is needed later, a new process is started.

    Args:
        root: the folder or zip from which the library itself (``distributor``) can be imported.
        url: the URL of ``output_dir``.
        environ: the environment of the process that accesses the URL.
    """

    def __init__(self, root: str, url: str, environ: Mapping[str, str]) -> None:
        self._root = root
        self._url = url
        self._environ = {name: value for name, value in environ.items() if name != NODE_ID}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, mark: str, own: str) -> None:
        """Check that the URL leads to the same folder as on the driver, and that this node can write files there.

        Args:
            mark: the name of a file that the driver has written to ``output_dir``. This node must find it at the URL.
            own: a name for a test file, which this node writes to the URL and removes again.

        Raises:
            StartError: the URL does not lead to the same folder as on the driver, or this node cannot write to it.
        """
        try:
            if not self._call("has", mark):
                raise OSError(
                    "the file that the driver has written to this URL is missing. Pass a URL that leads to the same "
                    "place from the driver and from executors"
                )
            self._call("check", own)
        except OSError as error:
            raise StartError(f"output_dir {self._url!r} cannot be used on this node: {error}") from None

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file in ``output_dir``, which is a URL, by the file's name."""
        found: dict[str, int] = self._call("sizes")
        return found

    def put(self, source: str, name: str) -> None:
        """Upload a local file to ``output_dir``, the folder at the URL, under the given name."""
        self._call("put", source, name)

    def move(self, source: str, name: str) -> None:
        """Rename a file in ``output_dir``, the folder at the URL, replacing any file that has the new name.

        Args:
            source: the file's name in the folder.
            name: the file's new name.
        """
        self._call("move", source, name)

    def get(self, name: str, target: str) -> None:
        """Download a file from ``output_dir``, the folder at the URL, to a local path."""
        self._call("get", name, target)

    def remove(self, name: str) -> None:
        """Remove a file from ``output_dir``, the folder at the URL, if the file exists."""
        self._call("remove", name)

    def close(self) -> None:
        """Kill the process that accesses the URL, even during an upload."""
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
    """Access ``url`` as the agent asks on standard input, until the agent closes this input or ends (entry point)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends this process, even on a machine that shuts down
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of packages must not come between answers
    try:
        remote = Remote(url)
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
            _send(answers, _Answer(getattr(remote, call.method)(*call.arguments)))
        except OSError as error:
            _send(answers, _Answer(error=error.strerror or str(error)))


def _send(answers: IO[bytes], answer: _Answer) -> None:
    pickle.dump(answer, answers)
    answers.flush()
