"""From the reports of the nodes to the values, or to the one exception that tells the truth."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from distributor import errors
from distributor.outcomes import verdict
from distributor.outcomes.causes import RankFailed
from distributor.outcomes.failures import describe, is_consequence, is_infrastructure, order_failures
from distributor.shipping import pickling
from distributor.values.job import Status
from distributor.values.outcome import Collected, Failure, NodeReport, Outcome


def failure(rank=1, time=1.0, kind="ValueError", message=None, **fields):
    return Failure(rank, rank % 2, f"host-{'ab'[rank % 2]}", kind, message or f"{kind}: bad", time=time, **fields)


def collected(*ranks, values=None, **fields):
    """One report of one node; each rank is a state, or the failure it ended with."""
    found = []
    for rank, state in enumerate(ranks):
        if isinstance(state, Failure):
            found.append(Outcome(rank, state.host, "failed", state))
        else:
            found.append(Outcome(rank, "host-a", state))
    chunks = {rank: [pickle.dumps(value)] for rank, value in (values or {}).items()}
    return Collected((NodeReport(0, "host-a", tuple(found)),), chunks, **fields)


# What a rank says when it notices that a peer is gone: gloo's, NCCL's, the store's and the kernel's words.
ECHOES = [
    ("DistBackendError", "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp"),
    ("DistNetworkError", "DistNetworkError: The client socket has timed out"),
    ("DistStoreError", "DistStoreError: wait timeout after 300000ms"),
    ("ConnectionResetError", "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "BrokenPipeError: [Errno 32] Broken pipe"),
    ("RuntimeError", "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"),
    ("RuntimeError", "RuntimeError: Connection reset by peer"),
    ("RuntimeError", "RuntimeError: Broken pipe"),
    ("RuntimeError", "RuntimeError: Socket Timeout"),
    ("ConnectionRefusedError", "ConnectionRefusedError: [Errno 111] Connection refused"),
    ("ConnectionAbortedError", "ConnectionAbortedError: [Errno 103] Software caused connection abort"),
    ("lost", "ended together with its launcher, the process that started it"),
    ("UnavailableError", "UnavailableError: failed to connect to all addresses"),
    ("JaxRuntimeError", "jax.errors.JaxRuntimeError: UNAVAILABLE: The tasks have crashed"),
    ("RuntimeError", "RuntimeError: rank 0 has failed in the with block; the exception raised there says why"),
    ("RuntimeError", "RuntimeError: step 3: ranks 0-1 failed in the with block; the exception raised there says why"),
    ("RuntimeError", "RuntimeError: rank 1 failed in the call (ValueError: no); the exception raised there says why"),
    ("ValueError", "ValueError: UNKNOWN: Gloo AllReduce failed: [external/gloo/gloo/transport/tcp/pair.cc:534] Closed"),
]
REASONS = [
    ("ValueError", "ValueError: learning rate must be positive"),
    ("RuntimeError", "RuntimeError: CUDA out of memory"),
    ("ValueError", "ValueError: connection closed"),
    ("JaxRuntimeError", "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"),
    ("exit", "exited with code 3"),
    ("signal", "killed by SIGKILL"),
]


@pytest.mark.parametrize(("kind", "message"), ECHOES)
def test_a_broken_connection_is_an_echo(kind, message):
    assert is_consequence(failure(kind=kind, message=message))


@pytest.mark.parametrize(("kind", "message"), REASONS)
def test_other_errors_are_no_echoes(kind, message):
    assert not is_consequence(failure(kind=kind, message=message))


WRAPPED = """Traceback (most recent call last):
  File "/app/train.py", line 3, in train
    dist.all_reduce(total)
{}

{}:

Traceback (most recent call last):
  File "/app/train.py", line 5, in train
    raise StepError("step 7") from error
StepError: step 7"""

DIRECT = "The above exception was the direct cause of the following exception"
MEANWHILE = "During handling of the above exception, another exception occurred"


@pytest.mark.parametrize("link", [DIRECT, MEANWHILE])
@pytest.mark.parametrize(
    ("cause", "echo"),
    [
        (ECHOES[0][1], True),
        (f"torch.distributed.{ECHOES[1][1]}", True),
        (ECHOES[5][1], True),
        ("RuntimeError: CUDA out of memory", False),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
    ],
)
def test_what_follows_from_a_broken_collective_is_an_echo(cause, link, echo):
    """Not what follows from another connection, such as one to a server of the user."""
    wrapped = failure(0, 1.0, "StepError", "StepError: step 7", traceback=WRAPPED.format(cause, link))
    killed = failure(1, 2.0, "signal", "killed by SIGKILL", signal="SIGKILL")
    assert is_consequence(wrapped) is echo
    assert order_failures([wrapped, killed])[0] is (killed if echo else wrapped)


COLLECTIVE = """Traceback (most recent call last):
  File "/app/train.py", line 3, in train
    dist.all_reduce(total)
  File "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2999, in all_reduce
    work.wait()
RuntimeError: Application timeout"""

BACKWARD = """Traceback (most recent call last):
  File "/app/train.py", line 3, in train
    loss.backward()
  File "/lib/python3.11/site-packages/torch/autograd/graph.py", line 865, in _engine_run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: {}"""

WAIT = """Traceback (most recent call last):
  File "/app/train.py", line 4, in train
    work.wait()
RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer"""

DTENSOR = """Traceback (most recent call last):
  File "/app/train.py", line 3, in train
    model(batch)
  File "/lib/python3.11/site-packages/torch/distributed/tensor/_dispatch.py", line 300, in dispatch
    raise RuntimeError(
RuntimeError: got mixed torch.Tensor and DTensor"""

OWN = """Traceback (most recent call last):
  File "/app/train.py", line 3, in train
    raise RuntimeError("Connection closed by peer")
RuntimeError: Connection closed by peer"""


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (failure(kind="signal", message="killed by SIGKILL", signal="SIGKILL"), True),
        (failure(kind="lost"), True),
        (failure(kind="DistBackendError"), True),
        (failure(kind="RuntimeError", traceback=COLLECTIVE), True),
        (
            failure(
                kind="RuntimeError", traceback=BACKWARD.format("Connection closed by peer"), message="closed by peer"
            ),
            True,
        ),
        (
            failure(kind="RuntimeError", traceback=BACKWARD.format("CUDA error"), message="RuntimeError: CUDA error"),
            False,
        ),
        (failure(kind="RuntimeError", traceback=OWN, message="RuntimeError: Connection closed by peer"), False),
        (failure(kind="RuntimeError", traceback=WAIT, message=WAIT.splitlines()[-1]), True),
        (failure(kind="RuntimeError", traceback=DTENSOR, message=DTENSOR.splitlines()[-1]), False),
        (failure(kind="ValueError", signal="SIGABRT"), False),
        (failure(kind="ConnectionResetError"), False),
        (failure(kind="ValueError", traceback=COLLECTIVE), False),
        (failure(kind="exit", exit_code=3), False),
        (failure(kind="RuntimeError", message="DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (failure(kind="RuntimeError", message="DataLoader worker (pid 7) is killed by signal: Bus error. "), False),
        (failure(kind="AcceleratorError", message="CUDA error: uncorrectable ECC error encountered"), True),
        (failure(kind="RuntimeError", message="CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
        (failure(kind="AcceleratorError", message="CUDA error: device-side assert triggered"), False),
        (failure(kind="ValueError", message="DataLoader worker (pid 7) is killed by signal: Killed. "), False),
    ],
)
def test_failures_outside_of_users_code_are_infrastructure(found, expected):
    assert is_infrastructure(found) is expected


@pytest.mark.parametrize(("signal", "echo"), [("SIGABRT", True), ("SIGSEGV", False), ("SIGKILL", False)])
def test_only_an_abort_is_the_signal_of_an_echo(signal, echo):
    assert is_consequence(failure(kind="signal", message=f"killed by {signal}", signal=signal)) is echo


def drawn_failures(kinds):
    return st.builds(
        lambda rank, time, kind: failure(rank, time, *kind),
        st.integers(0, 9),
        st.integers(0, 5).map(float),
        st.sampled_from(kinds),
    )


@given(st.lists(drawn_failures(ECHOES + REASONS), min_size=1, max_size=8))
def test_the_root_is_the_earliest_reason_if_there_is_one(failures):
    ordered = order_failures(failures)

    assert sorted(map(repr, ordered)) == sorted(map(repr, failures))
    root, *others = ordered
    reasons = [one for one in failures if not is_consequence(one)]
    assert root.time == min(one.time for one in reasons or failures)
    assert bool(reasons) is not is_consequence(root)
    assert [one.time for one in others] == sorted(one.time for one in others)


def test_a_rank_that_was_told_to_stop_is_not_the_root():
    root, echo = failure(0, 3.0), failure(1, 2.0, message="Connection closed by peer", kind="RuntimeError")
    stopped = failure(2, 1.0, after_stop=True)
    assert order_failures([stopped, echo, root]) == (root, stopped, echo)
    assert order_failures([stopped, echo])[0] == echo
    assert order_failures([stopped])[0] == stopped


def test_the_drivers_clock_counts_where_it_was_told():
    """The host of ranks 1 and 3 is an hour behind; that of rank 0 is not."""
    first, behind, other = failure(0, 5000.0), failure(1, 1405.0), failure(3, 1404.0)
    told = [replace(first, time=5000.2), replace(behind, time=5005.25)]
    at = [each.time for each in verdict.on_one_clock([first, behind, other], told)]
    assert at == [5000.0, 5005.25, 5004.25]
    found = collected(first, behind)
    error = verdict.verdict(RankFailed(tuple(told)), found, None, label="3f2a", world_size=2).error
    assert isinstance(error, errors.TrainingError)
    assert [each.rank for each in error.failures] == [0, 1]


def test_an_error_that_cannot_be_explained_is_an_error():
    found = collected(failure(0, 1.0), failure(1, "noon"))
    for cause in (None, RankFailed((failure(0, 1.0), failure(1, "noon")))):
        told = verdict.verdict(cause, found, None, label="3f2a", world_size=2)
        assert isinstance(told.error, errors.DistributorError)
        assert "TypeError" in str(told.error)
        assert told.status is Status.FAILED


def test_an_earlier_echo_is_not_the_root():
    echo, root, later = failure(0, 1.0, *ECHOES[5]), failure(1, 2.0), failure(2, 3.0)
    assert order_failures([later, echo, root]) == (root, echo, later)


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        pytest.param(failure(message="ValueError: no"), "rank 1 on host-b failed: ValueError: no", id="message-alone"),
        pytest.param(
            failure(
                message="ValueError: no",
                traceback="Traceback:\n  line\nValueError: no\n",
                log_tail="epoch 1\n[rank1]: Traceback:\n[rank1]:   line\n[rank1]: ValueError: no\n",
            ),
            "rank 1 on host-b failed: ValueError: no\n\nTraceback:\n  line\nValueError: no\n\n"
            "The last lines of rank 1:\nepoch 1",
            id="traceback-and-what-came-before",
        ),
        pytest.param(
            failure(kind="exit", message="exited with code 3", log_tail="epoch 1\n\nbye\n"),
            "rank 1 on host-b failed: exited with code 3\n\nThe last lines of rank 1:\nepoch 1\n\nbye",
            id="log-without-traceback",
        ),
        pytest.param(
            failure(kind="exit", message="exited with code 3", log_tail=" \n\n"),
            "rank 1 on host-b failed: exited with code 3",
            id="blank-log",
        ),
    ],
)
def test_text(root, expected):
    assert describe([root]) == expected


def test_text_shows_the_end_of_a_long_log():
    lines = describe([failure(log_tail="".join(f"line {i}\n" for i in range(100)))]).splitlines()
    assert lines[-1] == "line 99"
    assert "line 0" not in lines
    assert len(lines) < 30


def test_text_lists_what_came_after_the_root():
    text = describe([failure(1), failure(2, 2.0, *ECHOES[5]), failure(3, 3.0, "exit", "exited with code 1")])
    assert text.startswith("rank 1 on host-b failed: ValueError: bad\n")
    assert text.endswith(
        "Later failures, perhaps caused by the first:\n"
        f"  rank 2 on host-a: {ECHOES[5][1]}\n"
        "  rank 3 on host-b: exited with code 1"
    )


def trace(line, error, path="/work/train.py"):
    return f'Traceback (most recent call last):\n  File "{path}", line {line}, in train\n    step()\n{error}\n'


def test_ranks_that_fail_alike_are_told_together():
    alike = [
        failure(rank, message="ValueError: at 0x7f", traceback=trace(7, f"ValueError: at 0x7f{rank}"))
        for rank in (1, 2, 3)
    ]
    text = describe(alike)
    assert text == f"ranks 1-3 on host-b, host-a failed: ValueError: at 0x7f\n\n{alike[0].traceback.rstrip()}"


def test_many_hosts_are_counted():
    alike = [replace(failure(rank), host=f"host-{rank}") for rank in range(4)]
    assert describe(alike) == "ranks 0-3 on 4 hosts failed: ValueError: bad"
    assert describe(alike[:3]) == "ranks 0-2 on host-0, host-1, host-2 failed: ValueError: bad"


def test_echoes_are_a_line_with_the_place_in_the_users_code():
    inside = '  File "/opt/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper\n'
    echoes = [
        failure(
            rank,
            2.0,
            "RuntimeError",
            f"RuntimeError: Connection closed by peer [10.0.0.1]:{port}",
            traceback=trace(40, "").rstrip("\n") + "\n" + inside + f"RuntimeError: Connection closed by peer :{port}",
        )
        for rank, port in ((0, 4711), (2, 4711), (3, 4711))
    ]
    text = describe([failure(1, traceback=trace(31, "ValueError: bad")), *echoes])
    assert text.endswith(
        "Later failures, perhaps caused by the first:\n"
        "  ranks 0, 2-3 on host-a, host-b: RuntimeError: Connection closed by peer [10.0.0.1]:4711 (at train.py:40)"
    )
    assert text.count("Traceback") == 1


def test_each_traceback_that_leads_elsewhere_is_told_once():
    root = failure(1, traceback=trace(31, "ValueError: bad"))
    same_place = failure(2, 2.0, message="ValueError: rank 2", traceback=trace(31, "ValueError: rank 2"))
    elsewhere = failure(3, 3.0, "KeyError", "KeyError: 'lr'", traceback=trace(5, "KeyError: 'lr'", "Cell In[2]"))
    text = describe([root, same_place, elsewhere])
    assert text.count("Traceback") == 2
    assert "  rank 2 on host-a: ValueError: rank 2\n  rank 3 on host-b: KeyError: 'lr'\n    Traceback" in text
    many = [failure(rank, 3.0, "KeyError", f"KeyError: {rank}", traceback=trace(rank, "KeyError")) for rank in range(9)]
    text = describe([root, *many])
    assert text.count("Traceback") == 1 + 4
    assert text.endswith("  rank 8 on host-a: KeyError: 8 (at train.py:8)")


@pytest.mark.parametrize(
    ("found", "world_size", "expected"),
    [
        pytest.param(collected("finished", values={0: "v"}), 1, {0: "v"}, id="one"),
        pytest.param(collected("finished", "finished", values={0: None}), 2, {0: None}, id="rank-0-alone"),
        pytest.param(collected("finished", "finished", values={1: [1], 0: [0]}), 2, {0: [0], 1: [1]}, id="all"),
        pytest.param(collected("finished"), 1, {}, id="a-script-has-none"),
    ],
)
def test_values(found, world_size, expected):
    got = verdict.values(found, world_size)
    assert got == expected
    assert list(got) == sorted(got)


def test_values_of_several_nodes():
    reports = (NodeReport(1, "b", (Outcome(1, "b", "finished"),)), NodeReport(0, "a", (Outcome(0, "a", "finished"),)))
    assert verdict.values(Collected(reports, {0: [pickle.dumps(7)]}), 2) == {0: 7}


def test_a_failed_rank_raises_with_its_own_exception():
    cause = pickling.dump_exception(KeyError("lr"))
    root = failure(1, 2.0, "KeyError", "KeyError: 'lr'", exception=cause, exit_code=1, traceback="T", log_tail="L")
    echo = failure(0, 1.0, *ECHOES[5])
    with pytest.raises(errors.TrainingError) as caught:
        verdict.values(collected(echo, root, "stopped"), 3)
    error = caught.value
    assert type(error) is errors.TrainingError
    assert str(error).startswith("rank 1 on host-b failed: KeyError: 'lr'\n")
    assert error.failures == (root, echo)
    assert (error.rank, error.local_rank, error.host, error.exit_code, error.signal) == (1, 1, "host-b", 1, None)
    assert (error.traceback, error.log_tail) == ("T", "L")
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("lr",)


@pytest.mark.parametrize(
    ("root", "returned", "told"),
    [
        (failure(0, 5.0, "DistStoreError", "wait timeout"), 4.0, True),
        (failure(0, 5.0, "DistStoreError", "wait timeout"), 6.0, False),  # it was told to stop, and saved
        (failure(0, 5.0, "DistStoreError", "wait timeout"), None, False),
        (failure(0, 5.0, "KeyError", "KeyError: 'lr'"), 4.0, False),
        (failure(0, 5.0, "signal", "killed by SIGABRT", signal="SIGABRT", exit_code=None), 4.0, False),
    ],
)
def test_an_echo_names_the_ranks_that_had_returned(root, returned, told):
    ranks = (Outcome(0, "a", "failed", root), Outcome(1, "a", "finished", called=1.0, returned=returned))
    with pytest.raises(errors.TrainingError) as caught:
        verdict.values(Collected((NodeReport(0, "a", ranks),)), 2)
    advice = "Rank 1 had already returned: all ranks must take part in each collective"
    assert (advice in str(caught.value).splitlines()[2:3]) is told


def test_a_traceback_without_frames_is_not_told_twice():
    text = "ModuleNotFoundError: No module named 'acme'"
    assert describe([failure(kind="ModuleNotFoundError", message=text, traceback=text + "\n")]).count(text) == 1


@pytest.mark.parametrize("exception", [None, b"no pickle", pickle.dumps("no exception")])
def test_a_failed_rank_whose_exception_cannot_be_read(exception):
    error = verdict.training_error([failure(exception=exception)])
    assert str(error) == "rank 1 on host-b failed: ValueError: bad"
    assert error.__cause__ is None


@pytest.mark.parametrize("kind", [errors.StartError, errors.ResourceError])
def test_what_a_node_lacks_is_no_failure_of_training(kind):
    exception = pickling.dump_exception(kind("there is no compiler"))
    error = verdict.training_error([failure(exception=exception)])
    assert type(error) is kind
    assert str(error) == "on host-b: there is no compiler"


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        pytest.param(
            collected("finished", lost_hosts=("host-c", "host-b", "host-c")),
            errors.NodeLostError,
            ["lost the node on host-b; host-c. Its agent"],
            id="lost-hosts",
        ),
        pytest.param(
            collected(failure(0), "stopped", lost_hosts=("host-b",)),
            errors.TrainingError,
            ["rank 0 on host-a failed"],
            id="a-failure-explains-a-lost-host",
        ),
        pytest.param(
            collected("finished", "stopped", "stopped", "stopped", "finished", "stopped"),
            errors.NodeLostError,
            ["ranks 1-3, 5 were stopped before they finished: ", "no rank reported why"],
            id="stopped-without-a-reason",
        ),
        pytest.param(
            collected("finished", "finished", "stopped", "finished", "finished", "finished"),
            errors.NodeLostError,
            ["rank 2 was stopped before it finished: ", "no rank reported why"],
            id="one-stopped-without-a-reason",
        ),
        pytest.param(collected("finished"), errors.NodeLostError, ["ranks 1-5 "], id="never-reported"),
        pytest.param(Collected(), errors.NodeLostError, ["ranks 0-5 "], id="nobody-reported"),
    ],
)
def test_why_there_are_no_values(found, kind, words):
    with pytest.raises(errors.TrainingError) as caught:
        verdict.values(found, 6)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


def unreturned(rank):
    why = failure(rank, kind="torch.cuda.Stream", message="its return value of type Lock cannot be pickled")
    return Outcome(rank, why.host, "unreturned", why)


def test_an_unreturned_value_names_the_lowest_rank():
    found = Collected(
        (NodeReport(0, "host-a", (unreturned(2), Outcome(0, "host-a", "finished"), unreturned(1))),),
        {0: [pickle.dumps(0)]},
    )
    with pytest.raises(errors.ResultError, match=r"rank 1 on host-b finished, but its return value of type Lock"):
        verdict.values(found, 3)


def test_a_failure_counts_more_than_an_unreturned_value():
    found = Collected((NodeReport(0, "host-a", (unreturned(0), Outcome(1, "host-b", "failed", failure(1)))),))
    with pytest.raises(errors.TrainingError):
        verdict.values(found, 2)


def test_a_value_that_cannot_be_read():
    found = replace(collected("finished"), values={0: [b"no pickle"]})
    with pytest.raises(errors.ResultError, match="rank 0"):
        verdict.values(found, 1)


def test_a_node_that_gave_the_driver_up_says_so():
    report = collected("stopped").reports[0]
    found = Collected((replace(report, gave_up="heard nothing from the driver for 30 s"),))
    with pytest.raises(errors.NodeLostError) as caught:
        verdict.values(found, 1)
    told = f"rank 0 was stopped before it finished: the node on {report.host} heard nothing from the driver for 30"
    assert str(caught.value) == f"{told} s"


@pytest.mark.parametrize("name", ["StartError", "ResourceError", "ConfigurationError"])
def test_the_error_of_a_node_is_raised_again(name):
    found = Collected((*collected("finished").reports, NodeReport(1, "host-b", error=(name, "no torch"))))
    with pytest.raises(errors.DistributorError, match=r"^no torch$") as caught:
        verdict.values(found, 2)
    assert type(caught.value) is getattr(errors, name)
