"""What becomes of a request: by what there is, and by DISTRIBUTOR_COMPAT_CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distributor import ConfigurationError, ResourceError
from distributor.compat.accelerators import OnAccelerator
from distributor.compat.places import Place
from distributor.compat.running import Request, check_trial, settle, with_options
from distributor.launch.tensorflow.path import TensorFlow
from distributor.launch.torchrun import Torchrun

ASKED = Request("@distributed(gpus=8)", "gpus", 8, use_gpu=True, accelerator="H100", otherwise="do without")


EVERY = Request("@distributed()", "gpus")


CLUSTER = Place(executors=True, gpus=16)


def at(place: Place) -> Any:
    return lambda mode: place


def never(mode: bool | None) -> Place:
    raise AssertionError("nothing depends on what there is")


def test_a_trial_runs_on_cpus_without_a_check() -> None:
    settled = settle(replace(ASKED, local_mode=False, per_node=8), 2, never)
    assert (settled.processes, settled.local_mode, settled.use_gpu, settled.options) == (2, None, False, {})
    assert settled.launch == Torchrun()
    assert settle(replace(ASKED, local_mode=True), 3, never).local_mode is True


def test_gpu_types_are_checked_where_gpus_are() -> None:
    assert settle(ASKED, None, at(CLUSTER)).launch == OnAccelerator("H100", Torchrun())
    assert settle(replace(ASKED, accelerator=None), None, at(CLUSTER)).launch == Torchrun()


def test_all_gpus_are_taken_or_else_the_cpu() -> None:
    with_gpus, without = settle(EVERY, None, at(CLUSTER)), settle(replace(EVERY, processes=4), None, at(Place()))
    assert (with_gpus.processes, with_gpus.use_gpu) == (16, True)
    assert (without.processes, without.use_gpu) == (4, False)


@pytest.mark.parametrize(
    ("asked", "place", "error", "told"),
    [
        (ASKED, Place(exists=False), ConfigurationError, "none is active: create one first .*, or do without"),
        (ASKED, Place(gpus=4), ResourceError, r"@distributed\(gpus=8\) needs 8 GPUs, but this machine has 4: ask"),
        (replace(ASKED, processes=None), Place(), ResourceError, "takes all GPUs of this machine, but there are none"),
        (EVERY, Place(executors=True), ResourceError, "takes all GPUs of the executors, but there are none: start"),
        (EVERY, Place(executors=True, gpus=None), ConfigurationError, "their number is not known .*: pass gpus="),
        (ASKED, Place(executors=True), ResourceError, "needs 8 GPUs, but executors have none: set spark.executor.res"),
    ],
)
def test_requests_that_cannot_be_met(asked: Request, place: Place, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        settle(asked, None, at(place))


def test_gpus_that_have_not_come_up_yet_are_used() -> None:
    settled = settle(replace(EVERY, processes=2), None, at(Place(executors=True, gpus=None)))
    assert (settled.processes, settled.use_gpu) == (2, True)


def test_ranks_per_instance_are_a_limit_on_executors_only() -> None:
    asked = replace(ASKED, per_node=4, options={"name": "a"})
    assert settle(asked, None, at(CLUSTER)).options == {"max_processes_per_node": 4, "name": "a"}
    assert settle(asked, None, at(Place(gpus=8))).options == {"name": "a"}


def test_options_may_say_where_to_train_and_whether_to_use_gpus() -> None:
    asked = with_options(
        replace(EVERY, processes=2, options={"name": "a", "logs": "all"}), {"use_gpu": False, "name": "b"}
    )
    settled = settle(asked, None, at(CLUSTER))
    assert (settled.processes, settled.use_gpu, settled.options) == (2, False, {"name": "b", "logs": "all"})
    both = with_options(replace(EVERY, options={"env": {"A": "1", "B": "1"}}), {"env": {"B": "2"}})
    assert both.options == {"env": {"A": "1", "B": "2"}}
    here = with_options(EVERY, {"local_mode": True})
    assert settle(here, None, lambda mode: Place(gpus=4) if mode else CLUSTER).processes == 4
    assert settle(here, 2, never).local_mode is True
    there = with_options(EVERY, {"local_mode": False})
    with pytest.raises(ConfigurationError, match="none is active: create one .*, or leave out local_mode=False to"):
        settle(there, None, at(Place(exists=False)))
    assert with_options(EVERY, None) == EVERY


@pytest.mark.parametrize(("given", "taken"), [(1, True), (0, False), (True, True), (None, None)])
def test_options_may_be_numbers_instead_of_flags(given: Any, taken: bool | None) -> None:
    asked = with_options(EVERY, {"local_mode": given, "use_gpu": given})
    assert asked.local_mode is taken
    assert asked.use_gpu is taken


def test_an_option_that_the_request_sets_is_refused() -> None:
    told = "^use_gpu=True and options={'use_gpu': False} both set use_gpu: leave it out of options"
    with pytest.raises(ConfigurationError, match=told):
        with_options(ASKED, {"use_gpu": False})


def test_a_trial_has_the_processes_that_its_launch_path_needs() -> None:
    cluster = replace(EVERY, launch=TensorFlow(parameter_servers=1))
    told = "^DISTRIBUTOR_COMPAT_CPU=2 sets a number of processes that this call cannot use: .* too few .* to 3 or more"
    with pytest.raises(ConfigurationError, match=told):
        check_trial(cluster, 2)
    check_trial(cluster, 3)
