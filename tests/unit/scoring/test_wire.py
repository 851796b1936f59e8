"""Messages between a task and the model."""

import socket
import threading

import numpy as np
import pytest

from distributor.scoring.wire import ScoreAnswer, ScoreRequest, receive, send


def test_arrays_and_lists_arrive_as_they_were_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        big = np.arange(1 << 20, dtype="float32").reshape(-1, 4)
        sender = threading.Thread(
            target=send, args=(ours, ScoreRequest({"x": big, "t": ["a", "b"]}, 2, ("y",), 10, True))
        )
        sender.start()
        got = receive(theirs, ScoreRequest)
        sender.join()
    assert (got.inputs["x"] == big).all()
    assert got.inputs["x"].flags.writeable, "the model may change it"
    assert (got.inputs["t"], got.rows, got.outputs, got.batch_rows, got.skips) == (["a", "b"], 2, ("y",), 10, True)


def test_a_connection_that_ends_within_a_message_is_an_error():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.send(b"\0\0\0")
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs, ScoreAnswer)
