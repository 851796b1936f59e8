"""The memory tier of the ranks of one node: which state all ranks hold, however they are killed and started again."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

torch = pytest.importorskip("torch")

import stores  # noqa: E402
from fake_gpu import FakeCuda, on_gpu  # noqa: E402

from distributor.channel.tls import make_peer_key  # noqa: E402
from distributor.checkpoint import pickles, plans as planning  # noqa: E402
from distributor.checkpoint.memory.memory import Memory  # noqa: E402
from distributor.checkpoint.memory.replica_client import Peers  # noqa: E402
from distributor.checkpoint.memory.states import InMemory, Seat, Source, common  # noqa: E402
from distributor.checkpoint.plans import PlannedCopies  # noqa: E402
from distributor.checkpoint.records import folder_name  # noqa: E402
from distributor.values.checkpoints import PEERS, SharedMemory  # noqa: E402

SIZE = 1 << 20


def memory(folder: Path, rank: int = 0, limit: int = SIZE) -> Memory:
    """What a new process of a rank keeps."""
    return Memory(SharedMemory(str(folder), limit), rank, 2)


def name(step: int, attempt: int = 0) -> str:
    return folder_name(step, f"3f2a-{attempt}", step)


def keep(kept: Memory, step: int, tensors: dict[str, torch.Tensor], others: tuple[str, ...] = ()) -> None:
    room = kept.begin(name(step), step, tensors, others)
    for each, tensor in tensors.items():
        room[each].copy_(tensor)
    kept.seal(b"objects of %d" % step)


def held(kept: Memory) -> list[str]:
    return sorted(generation.checkpoint for generation in kept.held())


def test_a_new_process_finds_what_its_node_holds(tmp_path: Path) -> None:
    """Tensors of all sizes and types; one that the lower rank keeps for both; objects of each rank."""
    shared = {"weight": torch.randn(3, 5), "step": torch.tensor(7), "mask": torch.tensor([True, False, True])}
    own = {"part": torch.randn(2).to(torch.bfloat16), "none": torch.zeros(0, 4), "z": torch.ones(1, 1) * 1j}
    keep(memory(tmp_path, 0), 1, shared)
    keep(memory(tmp_path, 1), 1, own, tuple(shared))
    again = memory(tmp_path, 1)
    assert held(again) == [name(1)]
    found = again.read(InMemory(name(1)))
    assert found.objects == b"objects of 1"
    for each, tensor in {**shared, **own}.items():
        assert torch.equal(found.tensors[each], tensor)
        assert found.tensors[each].dtype == tensor.dtype == found.sizes[each].properties.dtype
        assert found.sizes[each].size == tensor.shape


def test_what_the_lower_rank_no_longer_has_is_not_held(tmp_path: Path) -> None:
    keep(memory(tmp_path, 1), 1, {}, ("weight",))
    assert held(memory(tmp_path, 1)) == []


def test_a_state_that_was_copied_in_part_does_not_count(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    for step in (1, 2):
        keep(kept, step, {"a": torch.full((4,), step)})
    kept.begin(name(3), 3, {"a": torch.ones(4)}, ())
    assert held(memory(tmp_path)) == [name(2)]


def test_a_state_may_be_revoked(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    for step in (1, 2):
        keep(kept, step, {"a": torch.full((4,), step)})
    kept.revoke(name(2))
    assert held(kept) == [name(1)]


def test_memory_stays_mapped_until_sizes_change(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    addresses = set()
    for step in range(6):
        room = kept.begin(name(step), step, {"a": torch.ones(4)}, ())
        addresses.add(room["a"].data_ptr())
        kept.seal(b"")
    assert len(addresses) == 2
    keep(kept, 7, {"a": torch.ones(5), "b": torch.zeros(2)})
    assert kept.read(InMemory(name(7))).tensors["a"].tolist() == [1] * 5
    assert kept.read(InMemory(name(5))).tensors["a"].shape == (4,)


def test_too_little_memory_is_said_once_and_nothing_old_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = memory(tmp_path, limit=1000)
    with caplog.at_level(logging.WARNING):
        for step, size in ((1, 100), (2, 1000), (3, 1000)):
            keep_what_fits(kept, step, torch.ones(size))
    (record,) = caplog.records
    assert "Checkpoints(memory=True): nothing is kept in memory: a rank needs" in record.message
    assert held(memory(tmp_path)) == []
    assert list(tmp_path.glob("*-[01]")) == []
    keep_what_fits(kept, 4, torch.ones(100))
    assert held(memory(tmp_path)) == [name(4)]


def test_ranks_together_keep_to_the_limit(tmp_path: Path) -> None:
    first, second = (memory(tmp_path, rank, limit=1000) for rank in range(2))
    keep_what_fits(first, 1, torch.ones(150))
    assert second.begin(name(1), 1, {"a": torch.ones(150)}, ()) == {}
    assert "a" in second.begin(name(2), 2, {"a": torch.ones(80)}, ())


def keep_what_fits(kept: Memory, step: int, tensor: torch.Tensor) -> None:
    for room in kept.begin(name(step), step, {"a": tensor}, ()).values():
        room.copy_(tensor)
    kept.seal(b"")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system")
def test_shared_memory_that_is_full_is_no_bus_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stores.small_disk(tmp_path, "1m"), caplog.at_level(logging.WARNING):
        kept = memory(tmp_path, limit=1 << 30)
        keep_what_fits(kept, 1, torch.ones(1 << 17))
        assert held(kept) == [name(1)]
        keep_what_fits(kept, 2, torch.ones(1 << 20))
        assert held(kept) == []
        del kept
    assert "No space left on device" in caplog.text


def test_memory_for_states_of_gpus_is_pinned_while_it_is_mapped(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    kept = memory(tmp_path)
    for step in range(1, 5):
        state = {"a": on_gpu(torch.ones(20)), "b": torch.ones(1)}
        room = kept.begin(name(step), step, state, ())
        copies = PlannedCopies().of(state, state.keys(), room, stay=False)
        assert fake_cuda.pinned[copies["a"].data_ptr()] == os.stat(tmp_path / f"0-{(step + 1) % 2}").st_size
        kept.seal(b"")
    assert (len(fake_cuda.pinned), fake_cuda.calls) == (2, 2)
    kept.begin(name(5), 5, {"a": on_gpu(torch.ones(40))}, ())
    assert (len(fake_cuda.pinned), fake_cuda.calls) == (2, 3)


@settings(max_examples=25, deadline=None)
@given(
    attempts=st.lists(
        st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 2), st.integers(0, 2))), min_size=1, max_size=5
    )
)
def test_no_kill_costs_more_than_the_save_that_it_hits(
    attempts: list[tuple[int, tuple[int, int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each attempt saves some steps, and is then killed: each rank before, within or after its next copy."""
    folder = tmp_path_factory.mktemp("memory")
    last = None
    for attempt, (whole, stages) in enumerate(attempts):
        ranks = [memory(folder, rank) for rank in range(2)]
        found = common([[each.checkpoint for each in rank.held()] for rank in ranks])
        assert found == last
        if found is not None:
            for number, rank in enumerate(ranks):
                assert rank.read(InMemory(found)).objects == f"{found} {number}".encode()
        for step in range(1, whole + 2):
            checkpoint = name(step, attempt)
            for number, (rank, stage) in enumerate(zip(ranks, stages, strict=True)):
                if step <= whole or stage > 0:
                    for room in rank.begin(checkpoint, step, {"a": torch.ones(2)}, ()).values():
                        room.fill_(step)
                if step <= whole or stage > 1:
                    rank.seal(f"{checkpoint} {number}".encode())
            if step <= whole or min(stages) > 1:
                last = checkpoint


class Peer:
    """Reaches no other node."""

    def send(self, *_: object) -> None:
        raise OSError("the node on host-b does not accept the state of this rank")


def test_each_kind_of_problem_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy that cannot be sent hides nothing that is said later."""
    kept = Memory(SharedMemory(str(tmp_path), 1000, True), 0, 2, Peer())  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for step, size in ((1, 10), (2, 10), (3, 1000), (4, 1000)):
            keep_what_fits(kept, step, torch.ones(size))
            kept.replicate(name(step), b"", (), Seat("b", 1, "host-b"))
    first, second = (record.message for record in caplog.records)
    assert (
        first
        == "Checkpoints(replicate=True): no copy is kept: the node on host-b does not accept the state of this rank"
    )
    assert second.startswith("Checkpoints(memory=True): nothing is kept in memory: a rank needs")


def test_only_the_lowest_rank_sends_what_all_have_in_full() -> None:
    """Two nodes of two ranks each. What a lower rank of the node has is not even kept there."""
    full = {"w": torch.zeros(2), "b": torch.zeros(1)}
    plans = [pickles.loads(planning._local({**full, f"own-{rank}": torch.zeros(1)})) for rank in range(4)]
    here, anywhere = planning._known_elsewhere(plans, ["a", "a", "b", "b"])
    assert here == [frozenset(), frozenset(full), frozenset(), frozenset(full)]
    assert anywhere == [frozenset(), frozenset(full), frozenset(full), frozenset(full)]
    nothing = [frozenset[str]()] * 4  # where no memory is used, the names need not be sent
    assert planning._known_elsewhere(plans, [""] * 4) == (nothing, nothing)


def test_other_nodes_are_named_if_they_cannot_be_reached(tmp_path: Path) -> None:
    told = {"address": "127.0.0.1", "port": 1, "certificate": make_peer_key().certificate, "token": "00"}
    (tmp_path / PEERS).write_text(json.dumps(told))
    session = SimpleNamespace(origin="3f2a-0", settings=SimpleNamespace(hosts={0: "host-a"}))
    peers = Peers(str(tmp_path), session)  # type: ignore[arg-type]
    gone = Seat("b", 1, "host-b", "127.0.0.1", 1)
    assert peers.seat == Seat(str(tmp_path), 0, "host-a", "127.0.0.1", 1)
    keep(memory(tmp_path), 1, {"a": torch.ones(2)})
    with pytest.raises(OSError, match="the node on host-b does not accept the state of this rank: .*refused"):
        peers.send(gone, tmp_path / "0-0", b"", b"", [(0, 8)])
    with pytest.raises(OSError, match="this run has only one node"):
        peers.send(None, tmp_path / "0-0", b"", b"", [(0, 8)])
    source = Source(1, "/dev/shm/b/0-0", ())
    with pytest.raises(
        OSError, match="the node on host-b does not send the saved state that it keeps in memory: .*refused"
    ):
        peers.tensors(gone, source)
    with pytest.raises(
        OSError, match="the node on host-b does not send the saved state that it keeps in memory: .*refused"
    ):
        peers.objects(gone, source, 3)
