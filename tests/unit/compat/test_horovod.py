"""Horovod's names in a process of its own, which is a training of one rank; and what is refused."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from distributor import ConfigurationError
from distributor.compat import horovod
from distributor.compat.horovod import runner, spark, torch as hvd
from distributor.compat.horovod.collectives import check_op


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def test_outside_of_a_run_there_is_one_rank_of_horovod(alone: None) -> None:
    hvd.init()  # a second time does nothing
    ranks = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert ranks == (0, 1, 0, 1, 0, 1)
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.shutdown()


@pytest.mark.parametrize("name", ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "barrier"])
def test_nothing_works_before_init(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"hvd.{name} needs the other ranks: call hvd.init\(\) first"):
        getattr(hvd, name)()


def test_the_backends_are_torchs() -> None:
    assert (hvd.mpi_built(), hvd.gloo_built()) == (False, True)
    assert hvd.cuda_built() is (torch.version.cuda is not None)
    assert hvd.nccl_built() is torch.distributed.is_nccl_available()
    assert (hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.gloo_enabled()) == (False, False, True)
    assert (hvd.ccl_built(), hvd.ddl_built(), hvd.rocm_built()) == (False, False, torch.version.hip is not None)


@pytest.mark.parametrize("name", [*hvd.INSTEAD])
def test_what_is_not_here_says_what_is(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"hvd.{name} is not supported: use "):
        getattr(hvd, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        hvd.no_such_name


@pytest.mark.parametrize("name", [*spark.INSTEAD])
def test_what_is_not_here_of_horovods_spark(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"horovod.spark.{name} is not supported: use "):
        getattr(spark, name)
    for module in (spark, horovod):
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name


def test_modules_are_reached_by_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("spark", spark), ("torch", hvd)):
        monkeypatch.delattr(horovod, name, raising=False)
        assert getattr(horovod, name) is module


@pytest.mark.parametrize("name", ["common", "keras", "lightning", "torch"])
def test_modules_of_estimators_say_what_to_do(name: str) -> None:
    told = f"^horovod.spark.{name} is not supported, since .*: write them to Parquet, and use distributor.*files$"
    with pytest.raises(ConfigurationError, match=told):
        importlib.import_module(f"distributor.compat.horovod.spark.{name}")


@pytest.mark.parametrize("flavour", ["tensorflow", "keras"])
def test_other_flavours_say_what_to_do(flavour: str) -> None:
    with pytest.raises(ConfigurationError, match=f'horovod.{flavour} is not supported.*launch="tensorflow"'):
        importlib.import_module(f"distributor.compat.horovod.{flavour}")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"extra_mpi_args": "-x A"}, "extra_mpi_args='-x A' cannot be used: MPI does not start the ranks"),
        ({"stdout": "out"}, "stdout='out' cannot be used: .*log_dir"),
        ({"stderr": "err"}, "stderr='err' cannot be used: .*log_dir"),
        ({"executable": "python3"}, "executable='python3' cannot be used: .*PYSPARK_PYTHON"),
        ({"hosts": "a:2"}, "hosts='a:2' cannot be used: ranks train on the executors"),
        ({"hostfile": "hosts"}, "hostfile='hosts' cannot be used: ranks train on the executors"),
        ({"num_proc": 2, "np": 3}, "num_proc=2 and np=3 both give the number of ranks: leave np out"),
        ({"np": 0}, "num_proc must be a positive integer, not 0"),
        ({"stdout": sys.stdout, "stderr": sys.stderr, "num_proc": 0}, "num_proc must be a positive integer, not 0"),
        ({"num_proc": 0}, "num_proc must be a positive integer, not 0"),
        (
            {"options": {"num_processes": 3}},
            r"^options={'num_processes': 3} cannot be used, since run\(\) itself .*: leave it out, and pass num_proc= ",
        ),
        ({"num_proc": 2, "options": {"launch": "mpi"}}, r"since run\(num_proc=2\) itself sets launch: leave it out$"),
        ({"options": {"use_gpu": "no"}}, "use_gpu must be True, False or None, not 'no'"),
        ({"options": {"local_mode": "here"}}, "local_mode must be True, False or None, not 'here'"),
    ],
)
def test_arguments_of_run_that_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        horovod.run(print, **given)


@pytest.mark.parametrize(
    ("np", "processes", "local_mode"), [(3, 3, False), (-2, 2, True), (-1, 1, True), (0, None, False)]
)
def test_the_number_says_where_to_run(np: int, processes: int | None, local_mode: bool) -> None:
    asked = runner.request(np, "all")
    assert (asked.processes, asked.local_mode, asked.options["logs"]) == (processes, local_mode, "all")


def test_wrong_arguments_of_the_runner() -> None:
    with pytest.raises(ConfigurationError, match="np must be a whole number, not 1.5"):
        horovod.HorovodRunner(np=1.5)
    with pytest.raises(
        ConfigurationError, match="driver_log_verbosity must be 'log_callback_only' or 'all', not 'few'"
    ):
        horovod.HorovodRunner(np=1, driver_log_verbosity="few")


def optimizer_of(*parameters: torch.Tensor, **given: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD([*parameters], 0.1), **given)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: hvd.init(comm=[0, 1]),
            r"init\(comm=\[0, 1\]\) is not supported, since all ranks of a run train together: leave it out",
        ),
        (lambda: hvd.init(process_sets=[[0]]), "init.process_sets="),
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "op=hvd.Adasum is not supported: use op=hvd.Average"),
        (
            lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
            "average=True and op=.* both choose the operation",
        ),
        (lambda: hvd.allreduce(torch.ones(1), op="sum"), "op must be hvd.Average, .* not 'sum'"),
        (lambda: hvd.allreduce(torch.ones(1), process_set=3), "process_set=3 cannot be used"),
        (lambda: hvd.allreduce(parameter(), op=hvd.Max), r"do not flow through hvd.allreduce\(op=hvd.Max\)"),
        (lambda: hvd.allgather(parameter()), "gradients do not flow through hvd.allgather: pass tensor.detach"),
        (lambda: hvd.broadcast(parameter(), 0), "gradients do not flow through hvd.broadcast"),
        (lambda: hvd.broadcast_parameters([parameter()]), "params must be model.state_dict"),
        (lambda: optimizer_of(parameter(), op=hvd.Max), "op must be hvd.Average or hvd.Sum for gradients, not hvd.Max"),
        (lambda: optimizer_of(parameter(), op=hvd.Adasum), "op=hvd.Adasum is not supported"),
        (lambda: optimizer_of(parameter(), backward_passes_per_step=0), "backward_passes_per_step must be a positive"),
        (lambda: optimizer_of(parameter(), named_parameters=[]), "named_parameters lacks 1 of the optimizer's"),
        (lambda: optimizer_of(parameter(), named_parameters=[1]), "pairs of a name and a parameter"),
        (
            lambda: optimizer_of(parameter(), named_parameters=[("a", parameter()), ("a", parameter())]),
            "named_parameters has 'a' more than once",
        ),
        (
            lambda: optimizer_of(parameter()).step(lambda: 1.0),
            r"step\(closure\) computes gradients that are not reduced",
        ),
    ],
)
def test_what_horovods_functions_refuse(call: Any, told: str, alone: None) -> None:
    with pytest.raises(ConfigurationError, match=told):
        call()


def test_gradients_under_way_are_not_thrown_away(alone: None) -> None:
    weight = parameter()
    optimizer = optimizer_of(weight)
    weight.sum().backward()
    with pytest.raises(ConfigurationError, match=r"zero_grad\(\) loses the gradients of the last backward\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert weight.tolist() == pytest.approx([0.9, 0.9])


def test_gradients_that_are_thrown_away_do_not_count(alone: None) -> None:
    used, unused = parameter(), parameter()
    optimizer = optimizer_of(used, unused)  # no reduction starts before the last parameter has its gradient
    used.sum().backward()
    optimizer.zero_grad()
    used.sum().backward()
    optimizer.step()
    assert used.tolist() == pytest.approx([0.9, 0.9])


def test_gradients_after_those_that_were_reduced_and_thrown_away_are_reduced(alone: None) -> None:
    weight = parameter()
    optimizer = optimizer_of(weight)
    weight.sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()  # nothing is under way
    assert weight.tolist() == pytest.approx([0.9, 0.9])


def test_more_backward_passes_than_expected(alone: None) -> None:
    weight = parameter()
    optimizer = optimizer_of(weight, backward_passes_per_step=2)
    weight.sum().backward()
    weight.sum().backward()
    with pytest.raises(ConfigurationError, match="more than backward_passes_per_step=2 backward passes before"):
        weight.sum().backward()
    optimizer.step()


def test_sparse_gradients(alone: None) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer_of(*table.parameters())
    with pytest.raises(ConfigurationError, match="a gradient is sparse, .* pass sparse_as_dense=True"):
        table(torch.tensor([1])).sum().backward()
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = optimizer_of(*table.parameters(), sparse_as_dense=True)
    before = table.weight[1].tolist()
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert table.weight[1].tolist() == pytest.approx([value - 0.1 for value in before], abs=1e-6)


def test_the_optimizer_keeps_its_class_and_state(alone: None) -> None:
    weight = parameter()
    plain = torch.optim.Adam([weight], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=[("weight", weight)])
    assert isinstance(optimizer, torch.optim.Adam)
    weight.sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert plain.state[weight] is optimizer.state[weight]
    assert torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("loads", ["plain", "distributed"])
@pytest.mark.parametrize("schedules", ["plain", "distributed"])
def test_optimizers_share_groups_and_state_after_a_state_is_loaded(schedules: str, loads: str, alone: None) -> None:
    weight, later = parameter(), parameter()
    plain = torch.optim.Adam([weight], 0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    either = {"plain": plain, "distributed": optimizer}
    scheduler = torch.optim.lr_scheduler.StepLR(either[schedules], 1, 0.5)
    either[loads].load_state_dict(either[loads].state_dict())
    weight.sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group({"params": [later]})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    assert plain.param_groups is optimizer.param_groups
    assert plain.state is optimizer.state
    assert plain.state[weight]["step"] == 1


@pytest.mark.parametrize("schedules", ["plain", "distributed"])
def test_a_scheduler_of_either_optimizer_sees_the_steps(schedules: str, alone: None) -> None:
    plain = torch.optim.SGD([parameter()], 0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    either = {"plain": plain, "distributed": optimizer}
    early, late = (torch.optim.lr_scheduler.StepLR(either[schedules], 1, 0.5) for _ in range(2))
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        early.step()
    optimizer.step()
    with warnings.catch_warnings(action="error"):
        late.step()


def saved_and_loaded(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "cloudpickle": lambda optimizer: pickle.loads(cloudpickle.dumps(optimizer)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("way", [*COPIES])
def test_a_copy_is_an_ordinary_optimizer(way: str, alone: None) -> None:
    weight = parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1, momentum=0.9))
    (3 * weight).sum().backward()
    optimizer.step()
    made = COPIES[way](optimizer)
    assert type(made) is torch.optim.SGD
    (momentum,) = made.state.values()
    assert momentum["momentum_buffer"].tolist() == [3.0, 3.0]
    (copied,) = made.param_groups[0]["params"]
    assert (copied is weight) is (way == "copy")
    before = copied.tolist()
    made.zero_grad()
    copied.sum().backward()
    made.step()  # the momentum is 0.9 * 3 + 1
    assert copied.tolist() == pytest.approx([value - 0.37 for value in before])


def test_a_model_and_its_optimizer_can_be_copied_together(alone: None) -> None:
    weight = parameter()
    optimizer = optimizer_of(weight)
    copied, made = copy.deepcopy((weight, optimizer))
    copied.sum().backward()
    optimizer.zero_grad()  # the copy's gradient is not under way
    made.step()
    assert copied.tolist() == pytest.approx([0.9, 0.9])
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 0.9])


def test_groups_and_state_can_be_replaced(alone: None) -> None:
    plain = torch.optim.SGD([parameter()], 0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    groups, state = [{**plain.param_groups[0], "lr": 0.2}], defaultdict(dict, {parameter(): {"momentum_buffer": None}})
    optimizer.param_groups, optimizer.state = groups, state
    assert plain.param_groups is groups
    assert plain.state is state


def test_hooks_of_steps_are_called_once_after_a_state_is_loaded(alone: None) -> None:
    optimizer, called = optimizer_of(parameter()), []
    optimizer.register_step_pre_hook(lambda *given: called.append("pre"))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert called == ["pre"]


def test_no_operation_is_an_average(alone: None) -> None:
    weight = parameter()
    optimizer = optimizer_of(weight, op=None)
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 0.9])


def test_gradients_can_be_clipped_before_the_step(alone: None) -> None:
    for skips in (True, False):
        weight = parameter()
        optimizer = optimizer_of(weight, op=hvd.Sum, gradient_predivide_factor=2.0)
        (3 * weight).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_value_([weight], 1.0)
        if skips:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        assert weight.tolist() == pytest.approx([0.9, 0.9])


def test_collectives_that_are_started(alone: None) -> None:
    transposed = torch.arange(4.0).reshape(2, 2).t()
    handle = hvd.broadcast_async_(transposed, root_rank=0, name="weights")
    assert hvd.synchronize(handle) is transposed
    copied = hvd.synchronize(hvd.broadcast_async(transposed, 0))
    assert copied is not transposed
    assert copied.equal(transposed)
    gathered = hvd.allgather_async(torch.tensor([1, 2]))
    assert hvd.poll(gathered)
    assert hvd.synchronize(gathered).tolist() == [1, 2]
    tensors = [torch.ones(1), torch.zeros(2)]
    assert all(made is given for made, given in zip(hvd.grouped_allreduce_(tensors, op=hvd.Sum), tensors, strict=True))


def test_older_and_newer_names_of_an_operation() -> None:
    assert [check_op(None), check_op(None, True), check_op(None, False)] == [hvd.Average, hvd.Average, hvd.Sum]
    assert check_op(hvd.Min) is hvd.Min
