"""MPICH's requests to spawn processes, and what they become."""

from __future__ import annotations

import pytest

from distributor.launch.mpi import pmi
from distributor.launch.mpi.programs import SHIM


def request(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in ("mcmd=spawn", *lines, "endcmd")).encode()


def through_shim(folder: str, command: str, *lines: str) -> bytes:
    """What a request becomes; ``lines`` follow the arguments of the shim."""
    words = [*SHIM[1:], folder, command]
    return request("execname=/bin/sh", *(f"arg{number}={word}" for number, word in enumerate(words, 1)), *lines)


@pytest.mark.parametrize(
    ("info", "folder", "command", "left"),
    [
        ([], ".", "python", []),
        ([("wdir", "/data")], "/data", "python", [("distributor-wdir", "/data")]),
        ([("soft", "1"), ("path", "/opt")], ".", "/opt/python", [("soft", "1"), ("distributor-path", "/opt")]),
        ([("host", "a,b")], ".", "python", [("distributor-host", "a,b")]),
        ([("hostfile", "h")], ".", "python", [("distributor-hostfile", "h")]),
    ],
)
def test_a_shim_gets_folder_and_command(
    info: list[tuple[str, str]], folder: str, command: str, left: list[tuple[str, str]]
) -> None:
    """The manager ignores keys that it does not know."""

    def lines(pairs: list[tuple[str, str]]) -> list[str]:
        numbered = enumerate(pairs)
        return [line for at, (key, value) in numbered for line in (f"info_key_{at}={key}", f"info_val_{at}={value}")]

    found = pmi.through_shims(
        request("execname=python", "argcnt=2", "arg1=execname=x", "arg2=mcmd=spawn", "info_num=1", *lines(info))
    )
    expected = through_shim(folder, command, "arg1=execname=x", "arg2=mcmd=spawn", "info_num=1", *lines(left))
    assert found == expected.replace(b"execname=/bin/sh\n", b"execname=/bin/sh\nargcnt=7\n", 1)


def test_each_program_of_a_request_gets_its_own_shim() -> None:
    both = request("execname=one", "argcnt=0") + request("execname=two", "argcnt=0")
    expected = through_shim(".", "one") + through_shim(".", "two")
    assert pmi.through_shims(both) == expected.replace(b"/bin/sh\n", b"/bin/sh\nargcnt=5\n")
