"""GPU types: which device is of which, and which ranks are refused."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from jobs import make_job

from distributor import ConfigurationError
from distributor.compat import accelerators
from distributor.compat.accelerators import CheckedPath, OnAccelerator
from distributor.launch import Torchrun
from distributor.values.outcome import Failure
from distributor.values.placement import Node, Placement
from distributor.values.plan import Call, Site


@pytest.mark.parametrize(
    ("accelerator", "device", "fits"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100", "NVIDIA H100 PCIe", True),
        ("A10", "NVIDIA A10G", True),
        ("A10", "NVIDIA A100-SXM4-40GB", False),
        ("A100", "NVIDIA A100-SXM4-40GB", True),
        ("H200", "NVIDIA GH200 480GB", False),
        ("T4", "Tesla T4", True),
        ("H100", "NVIDIA H1000", False),
    ],
)
def test_a_gpu_is_of_a_type(accelerator: str, device: str, fits: bool) -> None:
    assert accelerators.is_a(accelerator, device) is fits


def test_a_gpu_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "NVIDIA H100 80GB HBM3", 1: "NVIDIA A10G"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    accelerators.check_here("H100", local_rank=0)
    with pytest.raises(
        ConfigurationError, match="'H100' was asked for, but the GPU of this rank is 'NVIDIA A10G': ask"
    ):
        accelerators.check_here("H100", local_rank=1)


def test_a_gpus_type_is_read_in_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would be initialized there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"NVIDIA A10G of {os.getpid()}")
    with pytest.raises(ConfigurationError, match="'NVIDIA A10G of ") as caught:
        accelerators.check_here("H100", local_rank=0)
    assert str(os.getpid()) not in str(caught.value)


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(device: int) -> str:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_name", without)
    with pytest.raises(ConfigurationError, match="torch finds no GPU in this rank.*DISTRIBUTOR_COMPAT_CPU=2"):
        accelerators.check_here("H100", local_rank=0)


def test_the_check_comes_first_and_changes_nothing_else() -> None:
    path, inner = OnAccelerator("H100", Torchrun()).resolve(1, True), Torchrun()
    assert isinstance(path, CheckedPath)
    node = Node(0, "executor", "host", "127.0.0.1", 29500, 0, 0, 1, ("0",))
    site = Site(make_job(use_gpu=True, launch=path), Placement((node,)).shares(whole=False)[0])
    plan = path.plan(site)
    assert plan.first == Call("distributor.compat.accelerators", "check_here", {"accelerator": "H100"})
    assert replace(plan, first=None) == inner.plan(site)
    for name in ("name", "preload", "needs", "ports", "once", "restarts", "uses_torch"):
        assert getattr(path, name) == getattr(inner, name)
    failure = Failure(0, 0, "host", "ValueError", "no")
    assert path.env(True) == inner.env(True)
    assert path.advise(failure, site.job) == inner.advise(failure, site.job)
