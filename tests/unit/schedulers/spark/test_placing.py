"""Which placements by Spark are accepted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import Mock

import pytest
from jobs import make_job

from distributor.channel.server import ChannelServer
from distributor.channel.validation import Validation
from distributor.errors import ResourceError, StartError
from distributor.launch.tensorflow.path import TensorFlow
from distributor.launch.torchrun import Torchrun
from distributor.schedulers.spark.placing import Placing
from distributor.values.job import Job, Module
from distributor.values.messages import TaskFacts
from distributor.values.placement import NodeFacts, Placement


def job(*avoided: str, start_timeout: float = 60.0) -> Job:
    return make_job("3f2a", 2, Module("train"), False, avoided=avoided, start_timeout=start_timeout)


def facts(*executors: str, versions: tuple[dict[str, str], ...] = ({}, {})) -> list[NodeFacts]:
    return [
        NodeFacts(partition, name, f"host-{name[0]}", "10.0.0.1", 4000 + partition, versions=versions[partition])
        for partition, name in enumerate(executors)
    ]


def none(own: object) -> int:
    raise AssertionError("nobody asks")


@pytest.mark.parametrize(
    ("avoided", "executors", "room", "accepted"),
    [
        ((), ("a:1", "b:1"), none, True),
        (("c",), ("a:1", "b:1"), none, True),
        (("a",), ("a:1", "b:1"), lambda own: 2, False),
        (("a",), ("a:1", "b:1"), lambda own: 1, True),  # no other host has room
        (("a",), ("a:1", "b:1"), lambda own: own["b:1"], True),
        (("a", "b"), ("a:1", "b:1"), lambda own: 1, True),
        (("a", "b"), ("a:1", "b:1"), lambda own: 2, False),
    ],
)
def test_hosts_are_avoided_where_others_have_room(
    avoided: tuple[str, ...], executors: tuple[str, ...], room: Callable[[Mapping[str, int]], int], accepted: bool
) -> None:
    placing = Placing(job(*avoided), room)
    assert placing.accepts(facts(*executors)) == accepted
    if not accepted:
        hosts = ", ".join(avoided)
        assert placing.why == f"Spark put ranks on {hosts}, where two attempts of this run have failed"


def told(facts: list[NodeFacts]) -> list[TaskFacts]:
    return [TaskFacts("stage", each.partition, f"socket {each.partition}", each) for each in facts]


@pytest.mark.parametrize("launch", [Torchrun(), TensorFlow()])
def test_each_task_gets_the_share_of_its_node(launch: Any) -> None:
    versions = ({"torch": "2.9.0"}, {"torch": "2.9.1"})
    made = Placing(make_job("3f2a", 2, launch=launch), none).place(told(facts("a:1", "b:1", versions=versions)))
    assert made is not None
    answers, placement = made
    assert [answer.share for answer in answers] == list(placement.shares(whole=False))
    assert [answer.leader for answer in answers] == ["socket 0", "socket 1"]
    assert {answer.all_nodes for answer in answers} == {launch.all_nodes}
    assert [len(answer.warnings) for answer in answers] == [0, 1]


def test_a_list_of_nodes_that_fits_into_no_frame_ends_the_run_with_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placing = Placing(make_job("3f2a", 2, launch=TensorFlow()), none)
    with monkeypatch.context() as small:
        small.setattr("distributor.channel.frames.MAX_BODY", 64)
        assert placing.place(told(facts("a:1", "b:1"))) is None
        assert Placing(job(), none).place(told(facts("a:1", "b:1"))) is not None  # nodes of torchrun get no list
    assert isinstance(placing.error, ResourceError)
    assert re.search("tensorflow.* all 2 nodes.* longer than 64 bytes.*fewer nodes", str(placing.error))


def test_the_digest_of_a_placement_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    monkeypatch.setattr(Placement, "text", lambda self: texts.append(1) or "nodes")  # type: ignore[func-returns-value]
    server = ChannelServer(Mock(), guard=Validation("3f2a", 2, 2))
    server.place_by(Placing(job(), none).place)
    assert server._answers(told(facts("a:1", "b:1"))) is not None
    assert len(texts) == 1
    server._loop.close()


def test_an_error_while_placing_ends_the_tasks_and_then_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no rank")

    placing = Placing(job(), none)
    with monkeypatch.context() as broken:
        broken.setattr("distributor.launch.assign_ranks.place_checked", fail)
        assert placing.place(told(facts("a:1", "b:1"))) is None
    assert str(placing.error) == "the ranks cannot be placed: ZeroDivisionError: no rank"
    assert placing.place(told(facts("a:1", "b:1"))) is not None
    assert placing.error is None


def test_hosts_that_cannot_work_together_end_the_run_before_it_begins() -> None:
    placing = Placing(job(), none)
    assert placing.place(told(facts("a:1", "b:1", versions=({"torch": "2.9.0"}, {"torch": "2.8.0"})))) is None
    assert isinstance(placing.error, StartError)
    assert str(placing.error).startswith("torch is 2.8.0 on host-b and 2.9.0 on host-a")


def test_after_many_placements_any_is_accepted() -> None:
    placing = Placing(job("a"), lambda own: 9)
    answers = [placing.accepts(facts("a:1", "b:1")) for _ in range(22)]
    assert answers == [False] * 20 + [True] * 2


def test_late_placements_are_accepted() -> None:
    placing = Placing(job("a", start_timeout=0.1), lambda own: 9)
    end = time.monotonic() + 0.05
    while time.monotonic() <= end:
        pass
    assert placing.accepts(facts("a:1", "b:1"))


def test_a_session_that_does_not_answer_holds_up_nobody() -> None:
    def stopped(own: object) -> int:
        raise RuntimeError("SparkContext was shut down")

    assert Placing(job("a"), stopped).accepts(facts("a:1", "b:1"))
