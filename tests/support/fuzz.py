"""Frames of every kind of wrong, as a process with the run's token may send them, from hypothesis' strategies."""

from __future__ import annotations

import dataclasses
import json
import random
import struct
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.strategies import SearchStrategy

from distributor.channel import frames
from distributor.values import messages
from distributor.values.outcome import Log

#: Frames of one example, so that drawing is quick.
_EXAMPLE = 20


def numbers() -> SearchStrategy[int]:
    near = st.sampled_from([-1, 0, 1, 2, 3, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30])
    return near | st.integers(0, 3) | st.integers()


def texts(names: list[str]) -> SearchStrategy[str]:
    return st.sampled_from([*names, "x" * 700, "half a \ud800 character"]) | st.text(max_size=5)


def of_type(hint: Any, names: list[str]) -> SearchStrategy[Any]:
    """Values of the type that a field of a message has."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(of_type(argument, names) for argument in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(of_type(arguments[0], names), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(of_type(argument, names) for argument in arguments))
    if origin in (dict, Mapping) or hint is Any:
        return st.dictionaries(texts(names), plain(), max_size=3)
    if dataclasses.is_dataclass(hint):
        return of_class(typing.cast(type[Any], hint), names)
    simple: dict[Any, SearchStrategy[Any]] = {
        int: numbers(),
        str: texts(names),
        bool: st.booleans(),
        float: st.floats(),
        bytes: st.just(None),
        types.NoneType: st.none(),
    }
    return simple[hint]


def of_class(kind: type[Any], names: list[str]) -> SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: of_type(hints[field.name], names) for field in dataclasses.fields(kind)})


def plain() -> SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | numbers() | st.floats() | st.text(max_size=5)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner), max_leaves=5
    )


def framed(body: bytes, kind: int = 1) -> bytes:
    return struct.pack("!IB", len(body), kind) + body


def packed(message: messages.Message) -> bytes:
    return framed(json.dumps(messages.encode(message), default=repr).encode())


def bombs() -> SearchStrategy[bytes]:
    """JSON that takes much of something to parse, or lengths that lie."""
    return st.sampled_from(
        [
            framed(b"[" * 50_000),
            framed(b'{"kind":' * 5_000),
            framed(b"[" + b"1," * 150_000 + b"1]"),
            framed(b'{"kind":"Beat","alive":' + b"9" * 50_000 + b"}"),
            framed(b'{"kind":"Beat","alive":1,"alive":2}'),
            framed(b'{"kind":"Beat","alive":1,"idle":NaN}'),
            framed(b'{"kind":"Beat","alive":1,"idle":1e999}'),
            framed(b"{" + b",".join(b'"%d":1' % number for number in range(20_000)) + b"}"),
            framed('{"kind":"Bye"}'.encode("utf-16")),
            struct.pack("!IB", frames.MAX_BODY, 1) + bytes(1000),
            struct.pack("!IB", frames.MAX_BODY, 2) + bytes(1000),
            struct.pack("!IB", 2**32 - 1, 1),
        ]
    )


def any_message(names: list[str]) -> SearchStrategy[messages.Message]:
    sent = [kind for kind in messages._KINDS.values() if issubclass(kind, messages.Message)]
    return st.one_of(*(of_class(kind, names) for kind in sent))


def any_frame(names: list[str]) -> SearchStrategy[bytes]:
    logs = st.builds(
        Log,
        st.integers(0, 5) | st.integers(0, 2**32 - 1),
        st.integers(0, 255),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=2000),
    )
    objects = st.dictionaries(st.sampled_from(["kind", "node", "rank", "failure"]), plain()).map(
        lambda values: framed(json.dumps(values).encode())
    )
    return st.one_of(
        any_message(names).map(packed),
        any_message(names).map(packed),
        logs.map(frames.pack_log),
        objects,
        st.builds(framed, st.binary(max_size=200), st.integers(0, 255)),
        bombs(),
    )


def draw(strategy: SearchStrategy[Any], count: int) -> list[Any]:
    """Draw so many values, the same ones each time."""
    drawn: list[Any] = []

    @settings(
        max_examples=-(-count // _EXAMPLE),
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(strategy, min_size=_EXAMPLE, max_size=_EXAMPLE))
    def collect(values: list[Any]) -> None:
        drawn.extend(values)

    while len(drawn) < count:
        collect()
    return drawn[:count]


def frames_of(names: list[str], count: int) -> list[bytes]:
    """Draw so many frames, all of them different: a frame that was drawn before gets a few other bytes."""
    chance, seen = random.Random(count), set()
    for drawn in draw(any_frame(names), count):
        frame = bytearray(drawn)
        while bytes(frame) in seen:
            for _ in range(3):
                frame[chance.randrange(len(frame))] = chance.choice(b'\x00\x01\x02"{}[],:0129aeE-.\xff')
            frame += chance.randbytes(2)
        seen.add(bytes(frame))
    return sorted(seen, key=lambda _: chance.random())


def connections(drawn: list[bytes], openings: list[bytes]) -> Iterator[list[bytes]]:
    """Deal frames out over connections, of which two in three begin as one of ours would."""
    for number, start in enumerate(range(0, len(drawn), 8)):
        opening = openings[number % len(openings) : number % len(openings) + 1] if number % 3 else []
        yield [*opening, *drawn[start : start + 8]]
