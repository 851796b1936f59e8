"""The ranks' output on the driver."""

import io
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributor.channel.frames import Log
from distributor.console import Console


def host_of(rank):
    return f"host-{rank}"


def shown(capsys, *pieces, flush=False):
    console = Console(host_of)
    for piece in pieces:
        console.write(Log(*piece))
    if flush:
        console.flush()
    return tuple(capsys.readouterr())


@pytest.mark.parametrize(
    ("pieces", "out", "err"),
    [
        pytest.param([(0, 1, b"epoch 1\n")], "[rank 0 host-0] epoch 1\n", "", id="line"),
        pytest.param([(3, 2, b"oh\n")], "", "[rank 3 host-3] oh\n", id="stderr"),
        pytest.param([(0, 1, b"a\n\nb\n")], "[rank 0 host-0] a\n[rank 0 host-0] \n[rank 0 host-0] b\n", "", id="lines"),
        pytest.param([(0, 1, b"")], "", "", id="nothing"),
        pytest.param([(0, 1, b"unfinished")], "", "", id="unfinished"),
        pytest.param([(0, 1, b"ep"), (0, 1, b"och"), (0, 1, b" 1\n2")], "[rank 0 host-0] epoch 1\n", "", id="joined"),
        pytest.param(
            [(0, 1, b"a"), (1, 1, b"b"), (0, 2, b"c"), (0, 1, b"A\n"), (1, 1, b"B\n"), (0, 2, b"C\n")],
            "[rank 0 host-0] aA\n[rank 1 host-1] bB\n",
            "[rank 0 host-0] cC\n",
            id="ranks-and-streams-apart",
        ),
        pytest.param([(0, 1, b"\xff\xfe|\n")], "[rank 0 host-0] \ufffd\ufffd|\n", "", id="not-utf-8"),
        pytest.param([(0, 1, b"\xc3"), (0, 1, b"\xa4\n")], "[rank 0 host-0] ä\n", "", id="character-in-two-pieces"),
    ],
)
def test_whole_lines_with_rank_and_host(capsys, pieces, out, err):
    assert shown(capsys, *pieces) == (out, err)


def test_flush_shows_unfinished_lines_once(capsys):
    console = Console(host_of)
    for piece in [(1, 1, b"one"), (0, 1, b"done\nzero"), (0, 2, b"err")]:
        console.write(Log(*piece))
    capsys.readouterr()
    console.flush()
    assert tuple(capsys.readouterr()) == ("[rank 0 host-0] zero\n[rank 1 host-1] one\n", "[rank 0 host-0] err\n")
    console.flush()
    assert tuple(capsys.readouterr()) == ("", "")


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_pieces_do_not_matter(data, cuts):
    def show(pieces):
        console, saved = Console(host_of), sys.stdout
        sys.stdout = io.StringIO()
        try:
            for piece in pieces:
                console.write(Log(0, 1, piece))
            console.flush()
            return sys.stdout.getvalue()
        finally:
            sys.stdout = saved

    edges = [0, *sorted(cuts), len(data)]
    assert show(data[start:end] for start, end in itertools.pairwise(edges)) == show([data])


class Broken(io.StringIO):
    """What is at the other end is gone."""

    def write(self, _text):
        raise BrokenPipeError


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(closed(), id="closed"),
        pytest.param(Broken(), id="broken-pipe"),
        # What Python makes of a descriptor that is closed at its start: python train.py >&-
        pytest.param(None, id="none"),
    ],
)
def test_output_that_is_gone_is_harmless(monkeypatch, capsys, stream):
    console = Console(host_of)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        console.write(Log(0, 1, b"lost\nkept"))
    console.write(Log(0, 1, b"\n"))
    assert capsys.readouterr().out == "[rank 0 host-0] kept\n"


def test_characters_that_the_output_lacks_do_not_lose_lines(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    Console(host_of).write(Log(0, 1, "loss 0.1\nä\n".encode()))
    assert buffer.getvalue() == b"[rank 0 host-0] loss 0.1\n[rank 0 host-0] \\xe4\n"
