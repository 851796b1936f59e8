"""A node's load, read from texts of /proc and of nvidia-smi, and sampled by a thread."""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping
from pathlib import Path

import pytest
import watch

from distributor.node import system_metrics
from distributor.node.system_metrics import Counters, Sampler

STAT = """\
cpu  1000 50 450 7000 500 0 0 1000 300 0
cpu0 500 25 225 3500 250 0 0 500 150 0
intr 1234
"""

NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 1000000 1 0 0 0 0 0 0 1000000 1 0 0 0 0 0 0
  eth0:3000000 1 0 0 0 0 0 0 500000 1 0 0 0 0 0 0
"""

MEMINFO = "MemTotal:       16000000 kB\nMemFree: 10 kB\nMemAvailable:   12000000 kB\nHugePages_Total:       0\n"


def test_guests_and_waits_for_disks_are_no_work_of_their_own() -> None:
    assert system_metrics.counters(STAT, NET) == Counters(2500, 10000, 4000000, 1500000)


def test_the_cpu_is_measured_since_the_last_sample_the_network_since_the_first() -> None:
    first, last, now = Counters(0, 0, 0, 0), Counters(90, 100, 10, 10), Counters(115, 200, 3000000, 2000000)
    assert system_metrics.load(first, last, now) == {
        "cpu_utilization_percentage": 25.0,
        "network_receive_megabytes": 3.0,
        "network_transmit_megabytes": 2.0,
    }
    assert system_metrics.load(now, now, now)["cpu_utilization_percentage"] == 0.0


def test_memory_is_used_unless_it_is_available() -> None:
    assert system_metrics.memory(MEMINFO) == {
        "system_memory_usage_megabytes": 4096.0,
        "system_memory_usage_percentage": 25.0,
    }


def test_gpus_tell_what_they_know() -> None:
    csv = "0, 97, 20000, 80000, 350.00, 700.00\n1, [N/A], 1000, 4000, [Not Supported], [N/A]\n"
    assert system_metrics.gpus(csv) == {
        "gpu_0_utilization_percentage": 97.0,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_memory_usage_megabytes": 20971.5,
        "gpu_0_power_usage_watts": 350.0,
        "gpu_0_power_usage_percentage": 50.0,
        "gpu_1_memory_usage_percentage": 25.0,
        "gpu_1_memory_usage_megabytes": 1048.6,
    }


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed, because it could not, at, all, go\n", "0, 1, 2\n"])
def test_an_error_of_nvidia_smi_is_no_gpu(text: str) -> None:
    assert system_metrics.gpus(text) == {}


def test_a_thread_samples_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0, 5, 1000, 4000, 70.00, 700.00\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    samples: queue.SimpleQueue[Mapping[str, float]] = queue.SimpleQueue()
    sampler = Sampler(0.01, samples.put)
    sampler.start()
    try:
        values = samples.get(timeout=watch.DEADLINE)
    finally:
        sampler.stop()
    assert values["gpu_0_utilization_percentage"] == 5.0
    assert 0 < values["system_memory_usage_percentage"] < 100
    assert 0 <= values["cpu_utilization_percentage"] <= 100
    assert 0 < values["disk_usage_percentage"] <= 100


def test_without_nvidia_smi_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    samples: queue.SimpleQueue[Mapping[str, float]] = queue.SimpleQueue()
    sampler = Sampler(0.01, samples.put)
    sampler.start()
    try:
        assert not [name for name in samples.get(timeout=watch.DEADLINE) if name.startswith("gpu")]
    finally:
        sampler.stop()
