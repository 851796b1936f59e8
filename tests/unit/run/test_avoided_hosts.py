"""Which hosts a run avoids."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import make_job

from distributor.launch.assign_ranks import place
from distributor.run.avoided_hosts import blamed, hosts_to_avoid
from distributor.run.nodes import Nodes
from distributor.values.outcome import Failure
from distributor.values.placement import NodeFacts

KILLED = Failure(2, 1, "b", "signal", "killed by SIGKILL", signal="SIGKILL", time=1.0)
BROKEN = Failure(3, 1, "b", "AcceleratorError", "CUDA error: uncorrectable ECC error encountered", time=1.0)
RAISED = Failure(0, 1, "a", "ValueError", "no", time=0.0)
ECHO = Failure(0, 1, "a", "RuntimeError", "Connection closed by peer", time=2.0)


def nodes(*lost: str, placed: bool = True) -> Nodes:
    """Two nodes with two ranks each, some of which are lost."""
    made = Nodes()
    if placed:
        facts = [
            NodeFacts(part, f"host-{name}:{4000 + part}", f"host-{name}", "127.0.0.1", 4000, cpus=1)
            for part, name in enumerate("aabb")
        ]
        grouped = [NodeFacts(**{**vars(each), "executor": f"{each.host}:40"}) for each in facts]
        made.placement = place(grouped, make_job(num_processes=4))
    for name in lost:
        made.heard(name, 0.0)
        made.lost(name)
    return made


@pytest.mark.parametrize(
    ("lost", "failures", "executor"),
    [
        ((), [], None),
        ((), [RAISED], None),
        ((), [ECHO, KILLED], "host-b:40"),
        ((), [ECHO, BROKEN], "host-b:40"),
        (("host-a:40",), [], "host-a:40"),
        (("host-a:40", "host-b:40"), [KILLED], "host-a:40"),  # Spark ends all tasks when it loses one
    ],
)
def test_who_is_blamed(lost: tuple[str, ...], failures: list[Any], executor: str | None) -> None:
    assert blamed(nodes(*lost), failures) == executor


def test_without_a_placement_nobody_is_blamed() -> None:
    assert blamed(nodes(placed=False), [KILLED]) is None


def test_a_host_is_avoided_after_two_failures_on_any_of_its_executors() -> None:
    assert hosts_to_avoid([]) == ()
    assert hosts_to_avoid(["a:1", "b:1", None, None]) == ()
    assert hosts_to_avoid(["b:1", "a:1", "b:2", "a:1", "a:3", "c:1"]) == ("a", "b")
    assert hosts_to_avoid(["fd00::1:1", "fd00::1:2"]) == ("fd00::1",)
