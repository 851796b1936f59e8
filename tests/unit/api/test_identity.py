"""What a run of a name trains, as it is compared with the next run of that name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from distributor.api.identity import identify
from distributor.values.job import Function, Module

PRINT = """
import json
from distributor.api.identity import identify
from distributor.values.job import Function

def train(tags, options): ...

found = identify("a", "auto", Function("train", b""), train, (set("abcdefgh"), {"of": [{*"ijkl"}]}), {})
print(json.dumps(found.shown))
"""


def shown(value: Any) -> str:
    def train(value: Any) -> None: ...

    return identify("a", "auto", Function("train", b""), train, (value,), {}).shown["value"]


def test_secrets_are_compared_but_not_shown() -> None:
    def train(lr: float, hf_token: str) -> None: ...

    found = identify("a", "auto", Function("train", b""), train, (0.1, "hush"), {})
    assert found.shown == {"lr": "0.1", "hf_token": "***"}
    assert found.arguments != identify("a", "auto", Function("train", b""), train, (0.1, "other"), {}).arguments
    words = ("--lr", "0.1", "--hf-token", "hush", "--api-key=hush")
    assert "hush" not in str(identify("a", "auto", Module("train", words), None, (), {}).shown)


def test_sets_are_the_same_in_each_process() -> None:
    told = [
        subprocess.run([sys.executable, "-c", PRINT], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=-1, check=True)
        for seed in ("1", "2")
    ]
    first, second = [json.loads(each.stdout) for each in told]
    assert first == second
    assert first["tags"] == "{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}"
    assert first["options"] == "{'of': [{'i', 'j', 'k', 'l'}]}"


class Odd:
    def __repr__(self) -> str:
        raise ValueError("odd")


class array:
    """Has the name of a type of Python's own."""

    def __repr__(self) -> str:
        return "array"


LOOP: list[Any] = []
LOOP += [{"in": LOOP}, LOOP]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (list(range(12)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]"),
        (10**50, f"{10**50}"),
        (("a", frozenset("ab")), "('a', frozenset({'a', 'b'}))"),
        ([[[["deep"]]]], "[[[['deep']]]]"),
        (object(), "<object object at 0x...>"),
        (Odd(), "<Odd>"),
        ({}, "{}"),
        ({"of": [set(), (1,)]}, "{'of': [set(), (1,)]}"),
        (LOOP, "[{'in': ...}, ...]"),
        (array(), "array"),
    ],
)
def test_an_argument_in_a_warning(value: Any, told: str) -> None:
    assert shown(value) == told


def test_long_arguments_are_compared_whole_and_shown_short() -> None:
    def digest(text: str) -> str:
        return identify("a", "auto", Function("train", b""), None, (text,), {}).arguments["argument 1"]

    assert shown("x" * 100) == repr("x" * 100)[:60] + "..."
    assert digest("x" * 100_000 + "y") != digest("x" * 100_000 + "z")


def test_what_is_nested_too_deeply_is_compared_all_the_same() -> None:
    deep: Any = {"deep"}
    for _ in range(20_000):
        deep = [deep]
    assert shown(deep)
    assert shown(10**5000)
