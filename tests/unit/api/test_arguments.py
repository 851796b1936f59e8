"""Which arguments of a run may be kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distributor.api.arguments import arguments_of
from distributor.values.job import Function, Script

FUNCTION = Function("train", b"")


def train(lr: float, model: Any, *more: int, epochs: int = 3, hf_token: str | None = None, **others: Any) -> None:
    pass


def test_plain_arguments_have_their_names() -> None:
    args = (0.1, object(), 7, 8)
    kept = arguments_of(FUNCTION, train, args, {"depth": 2, "where": Path("/data"), "password": "x", "hf_token": "y"})
    assert kept == {"lr": 0.1, "more.0": 7, "more.1": 8, "epochs": 3, "depth": 2, "where": "/data"}
    assert arguments_of(FUNCTION, train, (0.1, None), {})["hf_token"] is None


def test_a_function_without_a_signature_has_numbers() -> None:
    assert arguments_of(FUNCTION, dict, ("a",), {"b": 1}) == {"argument 1": "a", "b": 1}


def test_options_of_a_script_have_their_names() -> None:
    script = Script("train.py", b"", ("--lr", "0.1", "--fast", "--width=32", "--hf-token", "x", "data"))
    assert arguments_of(script, None, (), {}) == {"lr": "0.1", "fast": True, "width": "32", "argument 7": "data"}


def test_secrets_of_a_script_are_known_however_it_takes_options() -> None:
    words = (
        "-lr",
        "-0.1",
        "-v",
        "-hfToken",
        "x",
        "-token=x",
        "optim.lr=0.1",
        "+db.password=x",
        "--set",
        "api_key=x",
        "--",
    )
    kept = {"lr": "-0.1", "argument 3": "-v", "argument 7": "optim.lr=0.1", "argument 11": "--"}
    assert arguments_of(Script("train.py", b"", words), None, (), {}) == kept


def test_the_name_of_any_file_can_be_printed() -> None:
    assert arguments_of(FUNCTION, lambda path: None, (Path(os.fsdecode(b"a\xff")),), {}) == {"path": r"a\udcff"}


def test_long_texts_are_cut() -> None:
    assert arguments_of(FUNCTION, lambda text: None, ("x" * 10_000,), {}) == {"text": "x" * 500}
