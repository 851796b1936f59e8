"""What ranks run, and with which arguments."""

from __future__ import annotations

import enum
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from distributor.api.parameters import Options
from distributor.api.target import check_argv, find_target
from distributor.errors import ConfigurationError, PayloadError
from distributor.values.job import Module, Script


class Precision(enum.Enum):
    BF16 = "bf16"

    def __str__(self) -> str:
        return self.value


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (True, "True"),
        (3, "3"),
        (0.5, "0.5"),
        (numpy.float32(0.5), "0.5"),
        (numpy.int64(3), "3"),
        (numpy.bool_(True), "True"),
        (numpy.str_("x"), "x"),
        (Path("a/b"), "a/b"),
        (Precision.BF16, "bf16"),
    ],
)
def test_an_argument_becomes_text(argument: Any, text: str) -> None:
    assert check_argv([argument]) == (text,)


@pytest.mark.parametrize("argument", [None, [1], (1,), {"a": 1}, {1}, numpy.zeros(2), torch.zeros(1), object()])
def test_values_that_are_no_single_argument_are_refused(argument: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be strings, numbers, paths or enums, but argument 2 is "):
        check_argv(["x", argument])


@pytest.mark.parametrize(
    ("name", "text"), [("train", "print(1)"), ("train", "#!/usr/bin/env python\nprint(1)"), ("train.txt", "print(1)")]
)
def test_a_script_may_have_any_name(name: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.write_text(text)
    assert find_target(script, ("x",), {}, working_dir=None, local=True) == Script(str(script), text.encode(), ("x",))


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "descriptor", "link to a descriptor"])
@pytest.mark.parametrize("inside", [False, True])
def test_ranks_get_a_copy_of_a_script_that_only_the_driver_can_read(kind: str, inside: bool, tmp_path: Path) -> None:
    path, text = tmp_path / "train", b"this is no program, which ranks tell with its line"
    real = tmp_path / "real.py"
    real.write_bytes(text)
    with ThreadPoolExecutor(1) as writer, real.open() as opened:
        if kind == "pipe":
            os.mkfifo(path)
            writer.submit(path.write_bytes, text)
        elif kind == "descriptor":
            path = Path(f"/proc/self/fd/{opened.fileno()}")
        else:
            path = tmp_path / "train.py"
            path.symlink_to(f"/dev/fd/{opened.fileno()}" if kind == "link to a descriptor" else real)
            if kind == "file":
                path = real
        found = find_target(path, (), {}, working_dir=tmp_path if inside else None, local=True)
    assert isinstance(found, Script)
    assert (found.path, found.source) == (str(path), text)
    in_place = kind in ("file", "link")
    assert found.piped is not in_place
    assert found.inside == ("real.py" if inside and in_place else None)


@pytest.mark.parametrize("content", [b"#!/bin/sh\nif true; then echo x; fi\n", b"\x7fELF\x00"])
def test_a_program_of_another_language_is_no_script(content: bytes, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_bytes(content)
    with pytest.raises(PayloadError, match="train.sh' is not a Python script: pass the path of a Python"):
        find_target(script, (), {}, working_dir=None, local=True)


def test_a_module_may_be_in_the_pythonpath_of_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "found_there.py").touch()
    module = Module("found_there")
    assert find_target(module, (), {}, working_dir=tmp_path, local=True, python_path="/other:lib") == module
    with pytest.raises(PayloadError, match="there is no module 'found_there'"):
        find_target(module, (), {}, working_dir=tmp_path, local=True, python_path="/other")


@pytest.mark.parametrize("kind", [bool, int, numpy.bool_, numpy.int64])
@pytest.mark.parametrize("flag", [True, False])
def test_flags_may_be_numbers(flag: bool, kind: Any) -> None:
    options = Options.of(num_processes=1, use_gpu=kind(flag), require_group=kind(flag))
    assert options.resources.use_gpu is flag
    assert options.training.require_group is flag
