"""What a training's state is made of, and that only torch's own classes are read from a checkpoint."""

from __future__ import annotations

import gc
import io
import itertools
import operator
import os
import pathlib
import pickle
import random
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from distributor.errors import ConfigurationError

torch = pytest.importorskip("torch")

from fake_gpu import FakeCuda, on_gpu  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata  # noqa: E402

from distributor.checkpoint import pickles, shards, training_state  # noqa: E402
from distributor.checkpoint.interval import suggest_checkpoint_interval  # noqa: E402
from distributor.checkpoint.plans import PlannedCopies  # noqa: E402
from distributor.checkpoint.shards import MeasuredFile  # noqa: E402


def round_trip(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Restores from a state as if it had been written and read."""
    found = training_state.collect(saved)
    read = {name: tensor.clone() for name, tensor in found.tensors.items()}
    training_state.restore(loaded, training_state.TrainingState(read, found.objects))


def described(tensors: dict[str, Any]) -> dict[str, TensorStorageMetadata]:
    """Describes tensors as a checkpoint does."""
    return {
        name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [])
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("seeded", ["before", "after"])
def test_random_states_of_gpus_wait_for_cuda(seeded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA starts after the load, on fewer GPUs. A seed from before the load is overwritten, as without a GPU."""
    gpu, saved = torch.Generator(), torch.Generator().manual_seed(7)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", torch.cuda._LazySeedTracker())
    states = {**training_state._random_states(), "cuda": [saved.get_state()] * 2}
    if seeded == "before":
        torch.manual_seed(1)
    training_state._set_random_states(states)
    if seeded == "after":
        torch.manual_seed(1)
    for call in torch.cuda._lazy_seed_tracker.get_calls():  # as torch.cuda.init does
        if call:
            call[0]()
    assert gpu.initial_seed() == (7 if seeded == "before" else 1)
    assert torch.equal(gpu.get_state(), (saved if seeded == "before" else torch.Generator().manual_seed(1)).get_state())


def test_an_optimizer_that_has_state_for_some_parameters_only() -> None:
    """What had no gradient has no state afterwards either; so Adam counts no step too many."""
    model, other = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)]), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
    second = torch.optim.AdamW(other.parameters(), lr=0.5)
    round_trip({"m": model, "o": optimizer}, {"m": other, "o": second})
    assert len(second.state) == 2
    assert second.param_groups[0]["lr"] == 0.1
    assert torch.equal(second.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert second.state[other[0].weight]["step"] == 1


def test_names_are_those_of_the_module_itself() -> None:
    """A compiled model, tied weights and an optimizer of another model's parameters."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)
            self.again = self.module

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, value: dict[str, int]) -> None:
            self.seen = value["seen"]

    model = Tied()
    found = training_state.collect({"m": torch.compile(model)})
    assert sorted(found.tensors) == ["m.again.bias", "m.again.weight", "m.module.bias", "m.module.weight"]
    assert found.objects["m"] == {"_extra_state": {"seen": 3}}
    loaded = Tied()
    round_trip({"m": torch.compile(model)}, {"m": loaded})
    assert loaded.seen == 3
    stranger = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    assert "o" in training_state.collect({"m": model, "o": stranger}).objects


@pytest.mark.parametrize("wrapped", ["saved", "loaded"])
def test_activation_checkpointing_may_begin_or_end_between_runs(wrapped: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def entries(kind: str) -> dict[str, Any]:
        inner = torch.nn.Linear(2, 2)
        model = torch.nn.Sequential(checkpoint_wrapper(inner) if kind == wrapped else inner)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"m": model, "o": optimizer}

    saved, loaded = entries("saved"), entries("loaded")
    round_trip(saved, loaded)
    before, after = (each["o"].state_dict()["state"] for each in (saved, loaded))
    assert all(torch.equal(before[number]["exp_avg"], after[number]["exp_avg"]) for number in range(2))


def test_an_optimizer_of_two_modules_is_saved_by_names() -> None:
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    (one(torch.ones(1, 2)) + two(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    entries = {"one": one, "two": two, "o": optimizer}
    found = training_state.collect(entries)
    assert "o.state.two.weight.momentum_buffer" in found.tensors
    other = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.5, momentum=0.9)
    round_trip(entries, {**entries, "o": other})
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_an_optimizer_before_its_split_model_is_saved_by_names() -> None:
    """A forward pass without gradients leaves the parameters of the model in one piece until its state is asked for."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert "o.state.m.weight.momentum_buffer" in training_state.collect({"o": optimizer, "m": model}).tensors
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("missing", ["modules", "scheduler"])
def test_what_the_checkpoint_does_not_have_is_not_passed_over(missing: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = training_state.collect({"m": model, "o": optimizer})
    read = training_state.TrainingState(found.tensors, found.objects)
    if missing == "modules":
        with pytest.raises(ConfigurationError, match="the optimizer 'o' was saved together with its modules"):
            training_state.restore({"o": optimizer}, read)
    else:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(ConfigurationError, match="the checkpoint has no 'schedule'"):
            training_state.restore({"schedule": schedule}, read)


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ("Adam", "SGD", "was saved with amsgrad, betas, .*in place of which SGD has dampening, momentum, nesterov"),
        ("SGD", "RMSprop", "was saved with dampening, .*nesterov, in place of which RMSprop has alpha"),
        ("Adam", "AdamW", None),
    ],
)
def test_refuses_the_state_of_an_optimizer_of_another_class(before: str, after: str, differs: str | None) -> None:
    model = torch.nn.Linear(2, 2)
    first, second = (getattr(torch.optim, name)(model.parameters(), lr=0.1) for name in (before, after))
    for module in ({"model": model}, {}):
        if differs is None:
            round_trip({**module, "o": first}, {**module, "o": second})
        else:
            with pytest.raises(ConfigurationError, match=f"the optimizer 'o' {differs}"):
                round_trip({**module, "o": first}, {**module, "o": second})


def test_warns_of_tensors_that_change_their_type(caplog: pytest.LogCaptureFixture) -> None:
    saved = described(training_state.collect({"m": torch.nn.Linear(2, 2).bfloat16()}).tensors)
    training_state.wanted({"m": torch.nn.Linear(2, 2).bfloat16()}, saved)
    assert caplog.text == ""
    training_state.wanted({"m": torch.nn.Linear(2, 2)}, saved)
    assert (
        "load_checkpoint converts 'm.weight', 'm.bias': 'm.weight' was saved as torch.bfloat16, and is torch.float32"
        in caplog.text
    )


@pytest.mark.parametrize("part", [0, 1])
def test_refuses_to_load_into_a_module_without_data(part: int) -> None:
    saved = training_state.collect({"net": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))}).tensors
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[part].to("meta")
    with pytest.raises(ConfigurationError, match=rf"'net.{part}.weight', .* call the module's to_empty\(device="):
        training_state.wanted({"net": model}, described(saved))


def test_numbers_of_numpy_are_saved_as_those_of_python() -> None:
    numpy = pytest.importorskip("numpy")
    packed = training_state.pack_objects({"best": {"loss": numpy.float64(0.5)}, "seen": [numpy.int64(3), (True,)]})
    training_state.check_weights_only(packed)
    loaded = training_state.load_objects(io.BytesIO(packed), weights_only=True)
    assert loaded == {"best": {"loss": 0.5}, "seen": [3, (True,)]}
    assert type(loaded["best"]["loss"]) is float


def test_a_tensor_among_plain_values_stays_on_its_device() -> None:
    state: dict[str, Any] = {"queue": torch.empty(3, device="meta"), "seen": torch.ones(1), "none": None}
    saved = {"queue": torch.ones(2), "seen": 4, "none": torch.ones(2)}
    training_state.restore(state, training_state.TrainingState({}, saved))
    assert (state["queue"].device.type, state["queue"].shape) == ("meta", (2,))
    assert (state["seen"], state["none"].tolist()) == (4, [1, 1])


def test_refuses_two_entries_whose_tensors_would_have_one_name() -> None:
    inner = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match="'model.0' has a tensor 'weight', .* 'model.0.weight'"):
        training_state.collect({"model": torch.nn.Sequential(torch.nn.Linear(1, 1)), "model.0": inner})


def test_refuses_to_save_what_cannot_be_loaded() -> None:
    packed = training_state.pack_objects({"path": Path("a")})
    with pytest.raises(ConfigurationError, match="load_checkpoint would refuse this state, .* pass weights_only=False"):
        training_state.check_weights_only(packed)


def test_random_states_are_those_of_the_save() -> None:
    import numpy.random  # numpy loads it at its first use only

    found = training_state.collect({})
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    training_state.restore({}, found)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn


def test_fsdp1_is_refused() -> None:
    class FullyShardedDataParallel(torch.nn.Module):
        pass

    with pytest.raises(ConfigurationError, match="'m' uses FullyShardedDataParallel: use torch.distributed.fsdp.fully"):
        training_state.collect({"m": torch.nn.Sequential(FullyShardedDataParallel())})


def test_copies_keep_their_memory() -> None:
    copies, tensors = PlannedCopies(), {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int64).reshape(2, 1)}
    first = copies.of(tensors, tensors.keys(), {}, stay=False)
    tensors["a"].fill_(5)
    assert first["a"].tolist() == [1, 1, 1]
    second = copies.of(tensors, {"a"}, {}, stay=False)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["a"].tolist() == [5, 5, 5]
    assert (second["b"].device.type, second["b"].shape) == ("meta", (2, 1))
    room = torch.empty(3)
    assert copies.of(tensors, {"a"}, {}, stay=True)["a"] is tensors["a"]
    assert copies.of(tensors, {"a"}, {"a": room}, stay=True)["a"] is room
    assert room.tolist() == [5, 5, 5]


def test_copies_from_gpus_are_pinned_in_one_piece(fake_cuda: FakeCuda) -> None:
    copies, tensors = PlannedCopies(), {"a": on_gpu(torch.ones(3)), "b": on_gpu(torch.ones(9)), "c": torch.ones(2)}
    first = copies.of(tensors, tensors.keys(), {}, stay=False)
    ((address, size),) = fake_cuda.pinned.items()
    assert [first[name].data_ptr() for name in "ab"] == [address, address + 64]
    assert size >= 64 + 36
    assert copies.of(tensors, {"a", "c"}, {}, stay=False)["a"].data_ptr() == address
    copies.of({"a": on_gpu(torch.ones(4))}, {"a"}, {}, stay=False)
    assert list(fake_cuda.pinned.values()) == [64]
    assert fake_cuda.calls == 2
    del copies, first
    gc.collect()
    assert not fake_cuda.pinned  # memory that is freed while it is pinned may never be pinned again


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("code of the checkpoint",))


def test_why_weights_only_refuses_objects_is_one_line_without_colours() -> None:
    with pytest.raises(ConfigurationError, match="Torch says: Weights only load failed") as raised:
        training_state.check_weights_only(training_state.pack_objects({"harmful": Harmful()}))
    assert "\x1b" not in str(raised.value) and "\n" not in str(raised.value)


def test_only_classes_of_checkpoints_are_unpickled(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (Harmful(), Path("x").absolute, torch.nn.Linear):
        with pytest.raises(pickle.UnpicklingError, match="is not part of a checkpoint's metadata"):
            pickles.loads(pickle.dumps(value))
    assert capsys.readouterr().out == ""
    for value in (pathlib.PosixPath("x"), torch.Size([2])):
        assert pickles.loads(pickle.dumps(value)) == value
    as_in_3_11_2 = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.planner\nWriteItemType\nVSHARD\ntR."
    assert pickles.loads(as_in_3_11_2).name == "SHARD"
    with pytest.raises(pickle.UnpicklingError, match="is not part of a checkpoint's metadata"):
        pickles.loads(b"cbuiltins\ngetattr\n(ctorch\nSize\nVmro\ntR.")
    about = torch.distributed.checkpoint.metadata.TensorProperties(torch.bfloat16)
    assert pickles.loads(pickles.dumps(about)).dtype is torch.bfloat16


@pytest.mark.parametrize("length", [1_500_000, 9_000_000])  # less and more than is written at a time
@pytest.mark.parametrize("folder", [None, "/dev/shm"])  # only through the kernel's cache in the second
def test_a_file_is_measured_while_it_is_written(folder: str | None, length: int) -> None:
    data = random.randbytes(3 * shards._PIECE + 5)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for end in (0, 3, shards._PIECE, len(data)):
            path = Path(place, str(end))
            with MeasuredFile(path, "x") as file:
                for start in range(0, end, length):
                    piece = memoryview(data)[start : min(start + length, end)]
                    assert file.write(piece) == len(piece)
                assert file.tell() == end
            assert path.read_bytes() == data[:end]
            assert file.shard == shards.measured(path, "x")
            shards.check(path, file.shard)


def test_a_checksum_finds_what_has_changed() -> None:
    data = bytearray(random.Random(0).randbytes(2 * shards._PIECE + 5))

    def checksum() -> int:
        found = 0
        for begin in range(0, len(data), shards._PIECE):
            found = shards.checksum(memoryview(data)[begin : begin + shards._PIECE], found)
        return found

    numbers = memoryview(data)[: 2 * shards._PIECE].cast("I")
    weights = [zlib.crc32(row.to_bytes(2, "big")) | 1 for row in range(1024)]
    sums = [
        sum(map(operator.mul, weights, numbers[begin + column : begin + (1 << 20) : 1024])) & 0xFFFFFFFF
        for begin in (0, 1 << 20)
        for column in range(1024)
    ]
    whole = checksum()
    assert whole == zlib.crc32(data[-5:], zlib.crc32(struct.pack("2048I", *sums)))
    for bit in range(32):
        numbers[1024 * bit] ^= 1 << bit
        assert checksum() != whole
        numbers[1024 * bit] ^= 1 << bit
    blocks = [slice(begin, begin + 4096) for begin in (0, 4096, 5 * 4096, shards._PIECE)]
    for block in blocks:  # one that is empty, and two that are in each other's place
        kept = data[block]
        data[block] = bytes(4096)
        assert checksum() != whole
        data[block] = kept
    for one, other in itertools.combinations(blocks, 2):
        data[one], data[other] = data[other], data[one]
        assert checksum() != whole
        data[one], data[other] = data[other], data[one]
    assert checksum() == whole


def test_a_file_is_read_in_whole_pieces_where_reads_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class File(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:3_000_000])

    (tmp_path / "x").write_bytes(random.randbytes(3 * shards._PIECE + 5))
    whole = shards.measured(tmp_path / "x", "x")
    monkeypatch.setattr(shards, "open", lambda path, mode: io.BufferedReader(File(path, mode)), raising=False)
    assert shards.measured(tmp_path / "x", "x") == whole


def test_a_write_that_only_the_cache_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system refuses a part of a block, as where a disk is almost full."""
    real = io.FileIO.write
    lengths: list[int] = []

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            lengths.append(len(data))
            return real(self, data[:700] if len(lengths) == 1 else data)

    monkeypatch.setattr(shards, "open", lambda path, mode, buffering: File(path, mode), raising=False)
    data = random.randbytes(shards._PIECE + 1)
    with MeasuredFile(tmp_path / "x", "x") as file:
        file.write(data)
    assert (tmp_path / "x").read_bytes() == data
    monkeypatch.undo()
    shards.check(tmp_path / "x", file.shard)
    assert len(lengths) == 3  # one again


def test_a_link_is_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "model.pt").write_text("weights")
    (tmp_path / "own" / "link.pt").symlink_to(tmp_path / "model.pt")
    (found,) = shards.found_in(tmp_path / "own").values()
    assert (found.name, found.size) == ("link.pt", 7)
    assert not (tmp_path / "own" / "link.pt").is_symlink()


def test_a_link_to_a_folder_is_what_the_folder_holds(tmp_path: Path) -> None:
    """Also if it leads to another link, or to another folder of the same rank."""
    (tmp_path / "own" / "step-1").mkdir(parents=True)
    (tmp_path / "own" / "step-1" / "a.pt").write_text("a")
    (tmp_path / "own" / "last").symlink_to("step-1")
    (tmp_path / "model" / "part").mkdir(parents=True)
    (tmp_path / "model" / "part" / "b.pt").write_text("bb")
    (tmp_path / "model" / "c.pt").symlink_to("part/b.pt")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "own" / "model").symlink_to(tmp_path / "link")
    found = shards.found_in(tmp_path / "own")
    assert {name: each.size for name, each in found.items()} == {
        **{"step-1/a.pt": 1, "last/a.pt": 1},
        **{"model/part/b.pt": 2, "model/c.pt": 2},
    }
    assert not [path for path in (tmp_path / "own").rglob("*") if path.is_symlink()]
    assert all((tmp_path / "own" / name).is_file() for name in found)
    assert (tmp_path / "model" / "c.pt").is_symlink() and (tmp_path / "model" / "part" / "b.pt").exists()


@pytest.mark.parametrize(
    ("link", "target", "name"),
    [
        ("own/model", "own", "model"),
        ("own/model", ".", "model"),
        ("own/part/model", "own", "part/model"),
        ("other/model", "own", "other/model"),
        ("other/part/model", "other", "other/part/model"),
    ],
)
def test_a_link_to_a_folder_that_contains_it_is_refused(link: str, target: str, name: str, tmp_path: Path) -> None:
    for each in ("own/part", "other/part"):
        (tmp_path / each).mkdir(parents=True)
    (tmp_path / "own" / "other").symlink_to(tmp_path / "other")
    (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(ConfigurationError, match=f"checkpoint_folder: '{name}' is a link to '.*', which contains"):
        shards.found_in(tmp_path / "own")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for name in ("broken", "loop", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "x").symlink_to(tmp_path / "gone")
    (tmp_path / "loop" / "x").symlink_to("x")
    os.mkfifo(tmp_path / "pipe" / "x")
    gone, pipe = "there is no file or folder at '{}'", "'{}' is neither a file nor a folder"
    for name, path, why in (("broken", "gone", gone), ("loop", "loop/x", gone), ("pipe", "pipe/x", pipe)):
        told = f"checkpoint_folder: 'x' cannot be saved, since {why.format(tmp_path / path)}: write a file, or remove"
        with pytest.raises(ConfigurationError, match=told):
            shards.found_in(tmp_path / name)


def test_removed_files_that_nfs_keeps_are_left_out(tmp_path: Path) -> None:
    for name in ("own/.nfs00a1", "own/a.pt", "own/.nfs", "linked/.nfs02", "linked/b.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("weights")
    (tmp_path / "own" / "model").symlink_to(tmp_path / "linked")
    assert list(shards.found_in(tmp_path / "own")) == [".nfs", "a.pt", "model/b.pt"]


@pytest.mark.parametrize(("where", "name"), [(os, "listdir"), (shards, "_check_name"), (shards, "measured")])
def test_a_file_that_vanishes_meanwhile_is_no_checkpoint(
    where: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have got another name, which was not seen: the checkpoint would lack it."""
    (tmp_path / "model.pt.part").write_text("weights")
    real = getattr(where, name)

    def call(*given: Any) -> Any:
        found = None if name == "measured" else real(*given)
        if (tmp_path / "model.pt.part").exists():
            (tmp_path / "model.pt.part").rename(tmp_path / "model.pt")
        return real(*given) if name == "measured" else found

    monkeypatch.setattr(where, name, call)
    with pytest.raises(FileNotFoundError):
        shards.found_in(tmp_path)


def test_a_link_whose_file_vanishes_meanwhile_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that leads nowhere is an error, whenever this happens."""
    (tmp_path / "own").mkdir()
    (tmp_path / "model.pt").write_text("weights")
    (tmp_path / "own" / "link.pt").symlink_to(tmp_path / "model.pt")
    monkeypatch.setattr(shards, "_check_name", lambda _: (tmp_path / "model.pt").unlink())
    with pytest.raises(FileNotFoundError):
        shards.found_in(tmp_path / "own")


@pytest.mark.parametrize("top", ["manifest.json", ".manifest.json.part", ".rank-1"])
@pytest.mark.parametrize("rest", ["", "/x"])
def test_names_that_the_package_uses_are_refused(top: str, rest: str, tmp_path: Path) -> None:
    """Only at the top of the folder."""
    path = tmp_path / f"sub/{top}{rest}"
    path.parent.mkdir(parents=True)
    path.touch()
    assert list(shards.found_in(tmp_path)) == [f"sub/{top}{rest}"]
    (tmp_path / "sub" / top).rename(tmp_path / top)
    with pytest.raises(ConfigurationError, match=f"checkpoint_folder: distributor itself uses the name '{top}' in"):
        shards.found_in(tmp_path)


@pytest.mark.parametrize("given", [{"failures_per_day": 0}, {"save_seconds": float("nan")}, {"save_seconds": "1"}])
def test_intervals_need_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(given))} must be a number greater than 0, not"):
        suggest_checkpoint_interval(**{"failures_per_day": 1.0, "save_seconds": 1.0, **given})


def test_intervals_follow_dalys_formula() -> None:
    """Close to Young's where saves are short, and no longer than the time between failures where they are long."""
    young = (2 * 1 * 86400) ** 0.5
    assert abs(suggest_checkpoint_interval(1, 1) - young) < 0.01 * young
    assert suggest_checkpoint_interval(86400, 5) == 1
