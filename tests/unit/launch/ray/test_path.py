"""The processes of a Ray cluster, its token and its folder."""

from __future__ import annotations

import pytest
from planned import TMP, job, placed, plans

from distributor.launch import Ray
from distributor.launch.assign_ranks import place
from distributor.values.placement import NodeFacts
from distributor.values.plan import Site


def test_ray_runs_once_and_each_node_offers_its_slots() -> None:
    head, other = plans(Ray(1 << 30, secret="s3cret"))
    assert [len(head.rank_env), len(other.rank_env)] == [1, 0]
    assert [node.slots for node in placed(job(3, Ray()), "aba").nodes] == [2, 1]
    assert head.rank_env[0]["RAY_ADDRESS"] == "10.0.0.1:6000"
    assert head.rank_env[0]["WORLD_SIZE"] == "1"
    (ours,), (theirs,) = head.companions, other.companions
    assert {"--head", "--port=6000", "--num-cpus=2", "--ray-client-server-port=6001"} <= {*ours.arguments["arguments"]}
    assert {"--address=10.0.0.1:6000", "--num-cpus=1", "--object-store-memory=1073741824"} <= {
        *theirs.arguments["arguments"]
    }
    assert theirs.arguments["head"] == ("10.0.0.1", 6000)
    assert ours.arguments["head"] is None


def test_how_rays_processes_are_started() -> None:
    head, other = (plan.companions[0] for plan in plans(Ray(secret="s"), use_gpu=True))
    assert {"--include-dashboard=false", "--disable-usage-stats"} <= {*head.arguments["arguments"]}
    assert {"--node-ip-address=10.0.0.1", "--num-gpus=2"} <= {*head.arguments["arguments"]}
    assert {"--node-ip-address=10.0.0.2", "--num-gpus=1"} <= {*other.arguments["arguments"]}
    assert head.arguments["use_gpu"] is other.arguments["use_gpu"] is True
    for plan in plans(Ray(secret="s")):
        (companion,) = plan.companions
        assert companion.arguments["use_gpu"] is False
        assert "--num-gpus=0" in companion.arguments["arguments"]
        assert companion.environment["RAY_AUTH_MODE"] == "token"
        assert companion.environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"
        given = {**plan.node_env, **companion.environment}
        assert not [name for name in given if name.startswith("TORCHELASTIC")]


def test_rays_token_is_the_runs_own_and_is_not_shown() -> None:
    one, other = (plans(Ray(secret=secret), "ab") for secret in ("hunter2", "b"))
    tokens = {plan.companions[0].environment["RAY_AUTH_TOKEN"] for plan in [*one, *other]}
    assert len(tokens) == 2
    assert one[0].rank_env[0]["RAY_AUTH_TOKEN"] in tokens
    assert not any(token in repr([*one, Ray(secret="hunter2")]) for token in (*tokens, "hunter2"))


@pytest.mark.parametrize(
    ("folder", "expected", "left"),
    [(TMP, f"{TMP}/ray", ()), ("/tmp/" + "x" * 60, "/tmp/dr-run7-bb0308fd", ("/tmp/dr-run7-bb0308fd",))],
)
def test_the_names_of_rays_sockets_are_short(folder: str, expected: str, left: tuple[str, ...]) -> None:
    (plan,) = plans(Ray(secret="s"), "a", folder)
    assert f"--temp-dir={expected}" in plan.companions[0].arguments["arguments"]
    assert plan.elsewhere == left


def test_rays_folder_has_another_name_in_each_run() -> None:
    """What others can guess they can make before."""
    assert len({plan.elsewhere for each in "ab" for plan in plans(Ray(secret=each), "ab", "/tmp/" + "x" * 60)}) == 2


def test_ray_counts_the_cpus_of_tasks_that_have_several_ranks() -> None:
    launch = Ray(secret="s")
    request = job(4, launch, ranks_per_task=2)
    facts = [NodeFacts(number, "a", "host-a", "10.0.0.1", 5000, cpus=3, ports=(1, 2)) for number in range(2)]
    who = place(facts, request)
    (plan,) = (launch.plan(Site(request, share, {}, folder=TMP)) for share in who.shares(whole=False))
    assert "--num-cpus=6" in plan.companions[0].arguments["arguments"]
