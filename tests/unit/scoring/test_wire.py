"""Messages between a task and the model."""

import socket
import threading

import numpy as np
import pytest

from distributor.scoring.row_memory import RowMemory
from distributor.scoring.wire import LOG, ScoreAnswer, ScoreRequest, end_of_log, receive, send


@pytest.mark.parametrize("memory", [(None, None), (RowMemory(), RowMemory())], ids=["socket", "memory"])
def test_arrays_and_lists_arrive_as_they_were_sent(memory):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        big = np.arange(1 << 20, dtype="float32").reshape(-1, 4)
        sender = threading.Thread(
            target=send, args=(ours, ScoreRequest({"x": big, "t": ["a", "b"]}, 2, ("y",), 10, True), memory[0])
        )
        sender.start()
        got = receive(theirs, ScoreRequest, memory[1])
        sender.join()
    assert (got.inputs["x"] == big).all()
    assert got.inputs["x"].flags.writeable, "the model may change it"
    assert (got.inputs["t"], got.rows, got.outputs, got.batch_rows, got.skips) == (["a", "b"], 2, ("y",), 10, True)


def test_arrays_keep_their_memory_as_it_is():
    pictures = np.arange(2 * 5 * 4 * 3, dtype="float32").reshape(2, 5, 4, 3)
    sent = {"channels": pictures.transpose(0, 3, 1, 2), "part": pictures[:, ::2], "fortran": pictures.T}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, ScoreRequest(sent, 2, ("y",), 10, True))
        got = receive(theirs, ScoreRequest).inputs
    for name, array in sent.items():
        assert (got[name] == array).all()
    assert [got[name].strides == sent[name].strides for name in sent] == [True, False, True]


def test_a_connection_that_ends_within_a_message_is_an_error():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.send(b"\0\0\0")
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs, ScoreAnswer)


def test_the_end_of_a_log_costs_no_reading_of_all(tmp_path):
    """A model may write bars of progress for weeks."""
    assert end_of_log(str(tmp_path)) == ""
    log = tmp_path / LOG
    log.write_bytes(b"\xffshort\n")
    assert end_of_log(str(tmp_path)) == "\N{REPLACEMENT CHARACTER}short"
    with log.open("r+b") as file:
        file.seek(1 << 34)
        file.write(b"the end\n")
    assert end_of_log(str(tmp_path)).strip("\0") == "the end"
