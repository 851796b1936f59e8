"""Who runs where, from the facts of all tasks."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from jobs import make_job

from distributor.errors import ResourceError
from distributor.launch.assign_ranks import place, with_port
from distributor.values.codec import plain
from distributor.values.job import Function
from distributor.values.placement import NodeFacts, Numbering


def job(num_processes, ranks_per_task=1, use_gpu=False, **options):
    return make_job("run", num_processes, Function("train", b""), use_gpu, ranks_per_task, **options)


def facts_of(executors, **common):
    """One task per entry of ``executors``, in order of partition: ``"aab"`` puts partitions 0 and 1 on executor a."""
    return [
        NodeFacts(partition, f"{name}:1", f"host-{name}", f"10.0.0.{ord(name)}", 5000 + partition, **common)
        for partition, name in enumerate(executors)
    ]


def with_gpus(executors, gpus, visible=None):
    return [replace(fact, gpus=tuple(own), visible_devices=visible) for fact, own in zip(facts_of(executors), gpus)]


def layout(placement):
    return [(node.host, list(node.ranks)) for node in placement.nodes]


@pytest.mark.parametrize(
    ("executors", "ranks_per_task", "expected"),
    [
        ("a", 1, [("host-a", [0])]),
        ("ab", 1, [("host-a", [0]), ("host-b", [1])]),
        ("ba", 1, [("host-b", [0]), ("host-a", [1])]),
        ("abab", 1, [("host-a", [0, 1]), ("host-b", [2, 3])]),
        ("aaab", 1, [("host-a", [0, 1, 2]), ("host-b", [3])]),
        ("baaa", 1, [("host-b", [0]), ("host-a", [1, 2, 3])]),
        ("ab", 2, [("host-a", [0, 1]), ("host-b", [2, 3])]),
        ("bab", 3, [("host-b", [0, 1, 2, 3, 4, 5]), ("host-a", [6, 7, 8])]),
    ],
)
def test_ranks_are_contiguous_on_nodes_in_order_of_their_lowest_partition(executors, ranks_per_task, expected):
    placement = place(facts_of(executors), job(len(executors) * ranks_per_task, ranks_per_task))
    assert layout(placement) == expected
    assert [node.node_rank for node in placement.nodes] == list(range(len(expected)))
    assert placement.world_size == len(executors) * ranks_per_task


def test_a_node_is_its_lowest_task():
    facts = facts_of("abba")
    master, other = place(facts[::-1], job(4)).nodes
    for node, lead in ((master, facts[0]), (other, facts[1])):
        assert (node.leader, node.executor, node.host, node.address, node.port) == (
            lead.partition,
            lead.executor,
            lead.host,
            lead.address,
            lead.port,
        )


def test_another_attempt_meets_at_another_port_of_node_0_and_keeps_its_places():
    for before in place(facts_of("abb"), job(3)).shares(whole=True):
        after = with_port(before, 6000)
        assert after.master == after.nodes[0] == replace(before.master, port=6000)
        assert after.node == after.nodes[before.node.node_rank]
        assert after.nodes[1:] == before.nodes[1:]
        assert after.digest == before.digest  # nodes are compared by the placement of the first attempt


def test_executors_of_one_host_are_nodes_of_their_own():
    facts = [replace(fact, host="same", address="10.0.0.1") for fact in facts_of("ab")]
    assert layout(place(facts, job(2))) == [("same", [0]), ("same", [1])]


def test_a_share_tells_what_holds_for_all_nodes():
    facts = facts_of("aabc")
    placement = place([*facts[:3], replace(facts[3], host="host-a")], job(4))
    shares = placement.shares(whole=False)
    assert [share.node for share in shares] == list(placement.nodes)
    assert {(share.master, share.count, share.world_size, share.even, share.nodes) for share in shares} == {
        (placement.master, 3, 4, False, ())
    }
    assert [share.beside for share in shares] == [2, 1, 2]
    assert shares[0].others == ("10.0.0.97", "10.0.0.98", "10.0.0.99")
    assert [share.nodes for share in placement.shares(whole=True)] == [placement.nodes] * 3


def test_a_share_is_as_long_in_a_large_run():
    def length(nodes):
        facts = [NodeFacts(n, f"{n:05}:1", f"host-{n:05}", f"10.0.0.{n:05}", 50000) for n in range(nodes)]
        return {len(json.dumps(plain(share))) for share in place(facts, job(nodes)).shares(whole=False)}

    assert max(length(2000)) < min(length(200)) + 100


def test_lookups():
    placement = place(facts_of("aab"), job(3))
    assert placement.master is placement.nodes[0]
    assert placement.node_of("b:1") is placement.nodes[1]
    assert [placement.host_of(rank) for rank in range(4)] == ["host-a", "host-a", "host-b", "?"]
    assert str(placement) == "node 0 on host-a (10.0.0.97): ranks 0-1; node 1 on host-b (10.0.0.98): rank 2"


@st.composite
def tasks(draw):
    """Facts of a cluster with GPUs of their own for all ranks, in a random order, and the ranks per task."""
    ranks_per_task = draw(st.integers(1, 4))
    executors = draw(st.text("abcde", min_size=1, max_size=12))
    facts, used = [], dict.fromkeys(executors, 0)
    for fact in facts_of(executors):
        name = fact.host[-1]
        gpus = tuple(str(used[name] + index) for index in range(ranks_per_task))
        used[name] += ranks_per_task
        facts.append(replace(fact, gpus=gpus))
    return facts, draw(st.permutations(facts)), ranks_per_task


@given(tasks())
def test_every_task_is_covered_once_whatever_the_order_of_facts(drawn):
    facts, shuffled, ranks_per_task = drawn
    request = job(len(facts) * ranks_per_task, ranks_per_task, use_gpu=True)
    placement = place(facts, request)

    assert place(shuffled, request) == placement
    assert [rank for node in placement.nodes for rank in node.ranks] == list(range(request.resources.num_processes))
    partitions = {
        node.executor: [f.partition for f in facts if f.executor == node.executor] for node in placement.nodes
    }
    assert sum(map(len, partitions.values())) == len(facts)
    leaders = [node.leader for node in placement.nodes]
    assert leaders == sorted(leaders)
    for node in placement.nodes:
        assert node.leader == min(partitions[node.executor])
        assert node.local_world_size == ranks_per_task * len(partitions[node.executor])
        assert node.gpus == tuple(str(index) for index in range(node.local_world_size))


@pytest.mark.parametrize(("cpus", "ranks_per_task"), [(1, 1), (8, 1), (8, 2), (7, 2), (1, 4)])
def test_a_node_knows_the_cpus_of_one_task(cpus, ranks_per_task):
    placement = place(facts_of("aab", cpus=cpus), job(3 * ranks_per_task, ranks_per_task))
    assert [node.task_cpus for node in placement.nodes] == [cpus, cpus]


@pytest.mark.parametrize(
    ("gpus", "visible", "ranks_per_task", "expected"),
    [
        pytest.param([["1"], ["0"]], None, 1, ("1", "0"), id="in-order-of-local-rank"),
        pytest.param([["2", "3"], ["0", "1"]], None, 2, ("2", "3", "0", "1"), id="several-per-task"),
        pytest.param([["0", "1"], ["2", "3"]], None, 1, ("0", "2"), id="more-than-ranks"),
        pytest.param([["0"], ["1"]], "4,6", 1, ("4", "6"), id="through-the-mapping"),
        # Going through this mapping twice would end at the start.
        pytest.param([["0"], ["1"]], "1,0", 1, ("1", "0"), id="through-the-mapping-once"),
        pytest.param([["1"], ["0"]], "GPU-aa,GPU-bb", 1, ("GPU-bb", "GPU-aa"), id="mapping-of-uuids"),
        pytest.param([["GPU-aa"], ["GPU-bb"]], "0,1", 1, ("GPU-aa", "GPU-bb"), id="addresses-are-uuids"),
    ],
)
def test_gpus_of_a_node(gpus, visible, ranks_per_task, expected):
    (node,) = place(with_gpus("aa", gpus, visible), job(2 * ranks_per_task, ranks_per_task, use_gpu=True)).nodes
    assert node.gpus == expected


@pytest.mark.parametrize(
    ("gpus", "ranks_per_task", "expected"),
    [
        pytest.param([["0", "1"], ["2", "3"]], 1, ("0", "2", "1", "3"), id="two-tasks"),
        pytest.param([["0", "1", "2", "3"]], 2, ("0", "2", "1", "3"), id="one-task"),
        pytest.param([["0", "1"]], 1, ("0", "1"), id="one-rank"),
    ],
)
def test_several_gpus_per_rank(gpus, ranks_per_task, expected):
    """cuda:LOCAL_RANK is a rank's own, and so is every LOCAL_WORLD_SIZE-th from there."""
    request = job(len(gpus) * ranks_per_task, ranks_per_task, use_gpu=True, gpus_per_process=2)
    (node,) = place(with_gpus("a" * len(gpus), gpus), request).nodes
    assert node.gpus == expected
    own = [node.gpus[local_rank :: node.local_world_size] for local_rank in range(node.local_world_size)]
    flat = [gpu for task in gpus for gpu in task]
    assert own == [tuple(flat[2 * rank : 2 * rank + 2]) for rank in range(node.local_world_size)]


def test_gpus_are_left_alone_without_use_gpu():
    (node,) = place(with_gpus("aa", [["0"], ["0"]]), job(2)).nodes
    assert node.gpus == ()


def test_nodes_may_have_gpus_of_the_same_name():
    placement = place(with_gpus("ab", [["0"], ["0"]]), job(2, use_gpu=True))
    assert [node.gpus for node in placement.nodes] == [("0",), ("0",)]


@pytest.mark.parametrize(
    ("gpus", "machines", "refused"),
    [
        pytest.param(("0", "0"), ("m1", "m2"), False, id="numbers-on-two-machines"),
        pytest.param(("0", "0"), ("m1", "m1"), True, id="numbers-on-one-machine"),
        pytest.param(("0", "1"), ("m1", "m1"), False, id="other-numbers"),
        pytest.param(("GPU-aa", "GPU-aa"), ("m1", "m2"), True, id="names-are-unique-in-the-world"),
        pytest.param(("GPU-aa", "GPU-bb"), ("m1", "m1"), False, id="other-names"),
    ],
)
def test_executors_that_would_share_a_gpu_are_refused(gpus, machines, refused):
    facts = [
        replace(fact, machine=machine) for fact, machine in zip(with_gpus("ab", [[gpu] for gpu in gpus]), machines)
    ]
    if not refused:
        assert [node.gpus for node in place(facts, job(2, use_gpu=True)).nodes] == [(gpu,) for gpu in gpus]
        return
    with pytest.raises(ResourceError, match=f"ranks 0 and 1 on host-b would share GPU {gpus[0]}"):
        place(facts, job(2, use_gpu=True))


@pytest.mark.parametrize(
    ("gpus", "visible", "ranks_per_task", "words"),
    [
        pytest.param([["0"], ["1"], ["0"]], None, 1, ["ranks 0 and 2", "host-a", "GPU 0"], id="shared"),
        pytest.param([["0"], ["1"], ["2"]], "5,6,5", 1, ["ranks 0 and 2", "GPU 5"], id="shared-by-the-mapping"),
        pytest.param([["0", "0"]], None, 2, ["ranks 0 and 1", "GPU 0"], id="shared-within-a-task"),
        pytest.param(
            [["0", "1"], ["2"]], None, 2, ["task 1 on host-a", "2 ranks with 1 GPU each", "1 GPU (2)"], id="too-few"
        ),
        pytest.param([[]], None, 1, ["task 0 on host-a", "0 GPUs (none)"], id="none"),
        pytest.param([["0"], ["2"]], "4,6", 1, ["GPU 2 on host-a", "only 2", "4,6"], id="beyond-the-mapping"),
    ],
)
def test_gpus_that_ranks_cannot_have_are_refused(gpus, visible, ranks_per_task, words):
    facts = with_gpus("a" * len(gpus), gpus, visible)
    with pytest.raises(ResourceError) as caught:
        place(facts, job(len(gpus) * ranks_per_task, ranks_per_task, use_gpu=True))
    for word in words:
        assert word in str(caught.value)


def on_hosts(executors, hosts):
    """Facts of one task per rank, on executors named by letters; the host of each executor."""
    facts = [NodeFacts(at, name, f"host-{name}", "10.0.0.1", 5000 + at) for at, name in enumerate(executors)]
    return [replace(fact, mounts=hosts[fact.executor]) for fact in facts]


def counted(executors, hosts):
    """By node: executor, ranks, and how they count themselves."""
    job = make_job(num_processes=len(executors), local_ranks="host")
    placement = place(on_hosts(executors, hosts), job)
    return [(share.node.executor, list(share.node.ranks), share.numbering) for share in placement.shares(whole=False)]


def test_ranks_of_a_host_are_numbered_together():
    assert counted("abca", {"a": "x", "b": "y", "c": "x"}) == [
        ("a", [0, 1], Numbering(0, 2, 0, 3)),
        ("c", [2], Numbering(0, 2, 2, 3)),
        ("b", [3], Numbering(1, 2, 0, 1)),
    ]


def test_an_executor_whose_host_is_not_known_counts_alone():
    assert counted("ab", {"a": "", "b": ""}) == [("a", [0], Numbering(0, 2, 0, 1)), ("b", [1], Numbering(1, 2, 0, 1))]


def test_by_default_an_executor_counts_alone():
    placement = place(on_hosts("abca", {"a": "x", "b": "y", "c": "x"}), make_job(num_processes=4))
    numberings = [share.numbering for share in placement.shares(whole=False)]
    assert [node.executor for node in placement.nodes] == ["a", "b", "c"]
    assert numberings == [Numbering(0, 3, 0, 2), Numbering(1, 3, 0, 1), Numbering(2, 3, 0, 1)]


def test_a_process_sees_one_mig_device():
    """CUDA shows it no more, so the second rank would find none."""
    assert place(with_mig("ab"), job(2, use_gpu=True)).nodes
    with pytest.raises(ResourceError, match="the ranks on host-a have MIG-0, MIG-1, but CUDA shows a process one MIG"):
        place(with_mig("aa"), job(2, use_gpu=True))


def with_mig(executors):
    return [replace(fact, gpus=(f"MIG-{at}",)) for at, fact in enumerate(facts_of(executors))]
