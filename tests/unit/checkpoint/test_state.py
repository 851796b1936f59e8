"""What a training's state is made of, and that only torch's own classes are read from a checkpoint."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from distributor.errors import ConfigurationError

torch = pytest.importorskip("torch")

from distributor.checkpoint import pickles, shards, state  # noqa: E402
from distributor.checkpoint.interval import suggest_checkpoint_interval  # noqa: E402
from distributor.checkpoint.plans import Copies  # noqa: E402
from distributor.checkpoint.shards import MeasuredFile  # noqa: E402


def round_trip(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Restores from a state as if it had been written and read."""
    found = state.collect(saved)
    read = {name: tensor.clone() for name, tensor in found.tensors.items()}
    state.restore(loaded, state.State(read, found.objects))


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
    found = state.collect({"m": torch.compile(model)})
    assert sorted(found.tensors) == ["m.again.bias", "m.again.weight", "m.module.bias", "m.module.weight"]
    assert found.objects["m"] == {"_extra_state": {"seen": 3}}
    loaded = Tied()
    round_trip({"m": torch.compile(model)}, {"m": loaded})
    assert loaded.seen == 3
    stranger = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    assert "o" in state.collect({"m": model, "o": stranger}).objects


def test_random_states_are_those_of_the_save() -> None:
    import numpy

    found = state.collect({})
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    state.restore({}, found)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn


def test_fsdp1_is_refused() -> None:
    class FullyShardedDataParallel(torch.nn.Module):
        pass

    with pytest.raises(ConfigurationError, match="'m' uses FullyShardedDataParallel: use torch.distributed.fsdp.fully"):
        state.collect({"m": torch.nn.Sequential(FullyShardedDataParallel())})


def test_copies_keep_their_memory() -> None:
    copies, tensors = Copies(), {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int64).reshape(2, 1)}
    first = copies.of(tensors, None)
    tensors["a"].fill_(5)
    assert first["a"].tolist() == [1, 1, 1]
    second = copies.of(tensors, frozenset("a"))
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["a"].tolist() == [5, 5, 5]
    assert (second["b"].device.type, second["b"].shape) == ("meta", (2, 1))


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("code of the checkpoint",))


def test_only_classes_of_checkpoints_are_unpickled(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (Harmful(), Path("x").absolute, torch.nn.Linear):
        with pytest.raises(pickle.UnpicklingError, match="is not part of a checkpoint's metadata"):
            pickles.loads(pickle.dumps(value))
    assert capsys.readouterr().out == ""
    about = torch.distributed.checkpoint.metadata.TensorProperties(torch.bfloat16)
    assert pickles.loads(pickles.dumps(about)).dtype is torch.bfloat16


def test_a_file_is_measured_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_PIECE", 7)
    with MeasuredFile(tmp_path / "x", "x") as file:
        for size in (0, 3, 20, 1):
            assert file.write(memoryview(bytes(size))) == size
        assert file.tell() == 24
    assert file.shard == shards.measured(tmp_path / "x", "x")
    assert shards.is_intact(tmp_path / "x", file.shard)
    with MeasuredFile(tmp_path / "empty", "empty") as file:
        pass
    assert shards.found_in(tmp_path)["empty"] == file.shard


@pytest.mark.parametrize("given", [{"failures_per_day": 0}, {"save_seconds": float("nan")}, {"save_seconds": "1"}])
def test_intervals_need_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(given))} must be a number greater than 0, not"):
        suggest_checkpoint_interval(**{"failures_per_day": 1.0, "save_seconds": 1.0, **given})


def test_intervals_follow_dalys_formula() -> None:
    """Close to Young's where saves are short, and no longer than the time between failures where they are long."""
    young = (2 * 1 * 86400) ** 0.5
    assert abs(suggest_checkpoint_interval(1, 1) - young) < 0.01 * young
    assert suggest_checkpoint_interval(86400, 5) == 1
