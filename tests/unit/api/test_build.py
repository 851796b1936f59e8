"""The job of a run, built without starting anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import trainings

from distributor import ConfigurationError, Distributor, TorchDistributor
from distributor.api.build import build_job, ranks_env
from distributor.api.parameters import Options
from distributor.launch import DeepSpeed, Ray, Torchrun
from distributor.values.job import Job, Module, OutputDir, TaskProfile, Widths, WorkingDir, warmth
from distributor.values.launch_path import BasePath
from distributor.values.options import Resources, Variables
from distributor.values.plan import Plan, Site


class Wide:
    """A scheduler whose tasks host two ranks each."""

    omp_threads = 3

    def shape(self, resources: Resources) -> tuple[int, TaskProfile | None]:
        return 2, TaskProfile(2 * (resources.cpus_per_process or 1))

    def node_limit(self, resources: Resources) -> int | None:
        assert resources.max_processes_per_node is not None
        return resources.max_processes_per_node - 1


def built(launch: Any = Torchrun(), scheduler: Any = None, environ: Any = None, **options: Any) -> Job:
    folders = WorkingDir("/project"), OutputDir("/out", 10)
    asked = Options.of(use_gpu=False, **options)
    widths = Widths(asked.resources.num_processes, asked.resources.num_processes)
    return build_job(asked, widths, launch, Module("train"), folders, scheduler, environ or {}, "all")


def test_a_job_holds_the_groups() -> None:
    job = built(num_processes=4, grace_period=3, logs="rank0", keep_warm=0, driver_ports=(1, 2), name="digits")
    assert (job.resources.num_processes, job.deadlines.grace_period, job.startup.keep_warm) == (4, 3.0, 0.0)
    assert (job.output.log_ranks, job.network.driver_ports, job.name) == ((0,), (1, 2), "digits")
    assert (job.target, job.working_dir, job.collect) == (Module("train"), WorkingDir("/project"), "all")
    assert job.output_dir == OutputDir("/out", 10)


def test_the_scheduler_decides_how_ranks_are_dealt_out() -> None:
    job = built(num_processes=4, cpus_per_process=3, max_processes_per_node=5, scheduler=Wide())
    assert (job.ranks_per_task, job.task_profile, job.num_tasks) == (2, TaskProfile(6), 2)
    assert (job.node_limit, job.resources.max_processes_per_node, job.spark_cpus) == (4, 5, 3)


def test_without_a_scheduler_what_it_decides_stays_open() -> None:
    job = built(num_processes=4, max_processes_per_node=2)
    assert (job.ranks_per_task, job.task_profile, job.node_limit, job.spark_cpus) == (1, None, None, None)


def test_stall_timeout_is_refused_where_processes_are_no_ranks() -> None:
    with pytest.raises(
        ConfigurationError, match=r"stall_timeout=5 watches ranks, but the processes of launch='ray' are not ranks"
    ):
        built(Ray(), stall_timeout=5)


def test_every_run_has_an_identifier_of_its_own() -> None:
    assert built().run_id != built().run_id


def test_variables_of_the_user_come_last() -> None:
    environ = {"W_A": "forwarded", "W_B": "forwarded", "DS_ACCELERATOR": "forwarded", "OTHER": "stays"}
    job = built(DeepSpeed(), environ=environ, env={"W_B": "env"}, forward_env=["W_*", "DS_*"])
    assert {name: job.env.get(name) for name in [*environ, "PYTORCH_NVML_BASED_CUDA_CHECK"]} == {
        "W_A": "forwarded",
        "W_B": "env",
        "DS_ACCELERATOR": "forwarded",
        "OTHER": None,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"])
def test_the_rank_contract_is_never_forwarded(name: str) -> None:
    assert ranks_env(Variables(forward_env=["*"]), {name: "1", "A": "2"}) == {"A": "2"}


def test_modules_of_the_launch_path_are_loaded_before_those_of_the_user() -> None:
    job = built(DeepSpeed(), preload=["json"])
    assert job.preload == ("deepspeed", "json")
    wanted = warmth(job)
    assert wanted is not None and wanted["preload"] == ["deepspeed", "json"]


@pytest.mark.parametrize("options", [{"keep_warm": 0}, {"start_method": "spawn"}])
def test_a_launch_path_may_need_modules_without_a_warm_process(options: dict[str, Any]) -> None:
    assert warmth(built(DeepSpeed(), **options)) is None


def planned(launch: Any) -> Any:
    return Distributor(2, local_mode=True, use_gpu=False, launch=launch).plan(trainings.rank)


@pytest.mark.parametrize(
    ("launch", "path"), [("torchrun", Torchrun()), (Torchrun(), Torchrun()), ("deepspeed", DeepSpeed())]
)
def test_a_launch_path_is_a_value_of_the_job(launch: Any, path: Any) -> None:
    assert planned(launch).launch == path


def test_the_default_is_torchrun() -> None:
    assert TorchDistributor(2, True, False).plan(trainings.rank).launch == Torchrun()


@dataclass(frozen=True)
class Greeting(BasePath):
    """A path of somebody else's."""

    name: str = "greeting"
    preload: ClassVar[tuple[str, ...]] = ("json",)

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return {"BEFORE": "torch"}

    def plan(self, site: Site) -> Plan:
        return Torchrun().plan(site)


def test_what_a_path_asks_for_before_torch_is_imported_is_in_the_job() -> None:
    job = planned(Greeting())
    assert (job.launch, job.preload, job.env["BEFORE"]) == (Greeting(), ("json",), "torch")


def test_a_pattern_forwards_no_choice_of_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_LAUNCH_BLOCKING": "1"}
    assert ranks_env(Variables(forward_env=["CUDA_*"]), environ) == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert ranks_env(Variables(forward_env=["CUDA_VISIBLE_DEVICES"]), environ) == {"CUDA_VISIBLE_DEVICES": "0,1"}
