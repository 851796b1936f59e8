"""What the model's server says of a process that has ended."""

import selectors
import socket

import pytest

from distributor.scoring.model_server import how_killed, ready


@pytest.mark.parametrize(
    ("code", "oom", "words"),
    [
        (3, False, "ended with exit status 3"),
        (-11, True, "was killed by SIGSEGV"),
        (-9, False, "was killed by SIGKILL"),
    ],
)
def test_how_a_process_has_ended(code, oom, words):
    assert how_killed(code, oom) == words


def test_lack_of_memory_is_named_with_the_memory_that_there_is():
    text = how_killed(-9, True)
    assert "was killed by SIGKILL, most likely for lack of memory" in text
    assert "this machine or container has" in text
    assert "smaller batch_rows=" in text


def test_what_another_turn_has_closed_gets_none():
    with selectors.DefaultSelector() as selector:
        pairs = [socket.socketpair() for _ in range(2)]
        for ours, theirs in pairs:
            selector.register(ours, selectors.EVENT_READ)
            theirs.close()
        turns = 0
        for _ in ready(selector):
            turns += 1
            for ours, _ in pairs:
                selector.unregister(ours)
                ours.close()
        assert turns == 1
