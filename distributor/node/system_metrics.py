"""Samples a node's load, under MLflow's names: what /proc and nvidia-smi say, and how full the disk is.

Source: ``mlflow.system_metrics.metrics``, whose values psutil and NVML give.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_QUERY = "index,utilization.gpu,memory.used,memory.total,power.draw,enforced.power.limit"

_PATIENCE = 10.0  # seconds for nvidia-smi

_MB, _MIB = 1e6, 1 << 20


@dataclass(frozen=True)
class Counters:
    """What a machine has counted since its start."""

    busy: int  # ticks of all CPUs
    ticks: int
    received: int  # bytes
    transmitted: int


def counters(stat: str, net: str) -> Counters:
    """Read ``/proc/stat`` and ``/proc/net/dev``.

    >>> counters("cpu  10 0 5 80 5 0 0 0 0 0", "Inter-|\\n face |\\n  lo: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0")
    Counters(busy=15, ticks=100, received=7, transmitted=9)
    """
    ticks = [int(each) for each in stat.partition("\n")[0].split()[1:9]]  # later ones are guests', counted in user
    idle = sum(ticks[3:5])
    links = [line.rpartition(":")[2].split() for line in net.splitlines()[2:]]
    return Counters(
        sum(ticks) - idle, sum(ticks), sum(int(each[0]) for each in links), sum(int(each[8]) for each in links)
    )


def load(first: Counters, last: Counters, now: Counters) -> dict[str, float]:
    """Return the load of the CPUs since ``last``, and what the network has brought since ``first``."""
    share = (now.busy - last.busy) / max(1, now.ticks - last.ticks)
    return {
        "cpu_utilization_percentage": round(100 * min(1.0, max(0.0, share)), 1),
        "network_receive_megabytes": (now.received - first.received) / _MB,
        "network_transmit_megabytes": (now.transmitted - first.transmitted) / _MB,
    }


def memory(meminfo: str) -> dict[str, float]:
    """Read ``/proc/meminfo``.

    >>> memory("MemTotal: 4000 kB\\nMemFree: 1 kB\\nMemAvailable: 1000 kB\\n")
    {'system_memory_usage_megabytes': 3.1, 'system_memory_usage_percentage': 75.0}
    """
    sizes = {
        name: 1024 * int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in meminfo.split("\n"))
        if rest
    }
    used = sizes["MemTotal"] - sizes["MemAvailable"]
    return {
        "system_memory_usage_megabytes": round(used / _MB, 1),
        "system_memory_usage_percentage": round(100 * used / sizes["MemTotal"], 1),
    }


def disk(stat: os.statvfs_result) -> dict[str, float]:
    """Return how full a file system is."""
    used, free = stat.f_frsize * (stat.f_blocks - stat.f_bfree), stat.f_frsize * stat.f_bavail
    return {
        "disk_usage_percentage": round(100 * used / max(1, used + free), 1),
        "disk_usage_megabytes": round(used / _MB, 1),
        "disk_available_megabytes": round(free / _MB, 1),
    }


def gpus(csv: str) -> dict[str, float]:
    """Read nvidia-smi's answer to the query of this module. What a GPU does not say, such as ``[N/A]``, is left out.

    >>> gpus("1, 30, [N/A], [N/A], 70.00, 700.00\\n")
    {'gpu_1_utilization_percentage': 30.0, 'gpu_1_power_usage_watts': 70.0, 'gpu_1_power_usage_percentage': 10.0}
    """
    values: dict[str, float] = {}
    for line in csv.splitlines():
        number, *texts = (each.strip() for each in line.split(","))
        if not number.isdecimal() or len(texts) != 5:  # an error in place of an answer
            continue
        busy, used, total, watts, limit = map(_number, texts)
        if busy is not None:
            values[f"gpu_{number}_utilization_percentage"] = busy
        if used is not None and total:
            values[f"gpu_{number}_memory_usage_percentage"] = round(100 * used / total, 1)
            values[f"gpu_{number}_memory_usage_megabytes"] = round(used * _MIB / _MB, 1)
        if watts is not None and limit:
            values[f"gpu_{number}_power_usage_watts"] = watts
            values[f"gpu_{number}_power_usage_percentage"] = round(100 * watts / limit, 1)
    return values


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Sampler:
    """A thread that samples until :meth:`stop`: nvidia-smi may take seconds, which the agent does not have."""

    def __init__(self, interval: float, send: Callable[[Mapping[str, float]], object]) -> None:
        self._interval = interval
        self._send = send
        self._over = threading.Event()
        self._asks_gpus = True

    def start(self) -> None:
        threading.Thread(target=self._run, name="distributor-load", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        first = last = _count()
        while not self._over.wait(self._interval):
            now = _count()
            values = {**load(first, last, now), **memory(Path("/proc/meminfo").read_text()), **disk(os.statvfs("/"))}
            values |= self._ask_gpus()
            with suppress(RuntimeError):  # the agent has ended meanwhile
                self._send(values)
            last = now

    def _ask_gpus(self) -> dict[str, float]:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        if self._asks_gpus:
            try:
                return gpus(subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE).stdout)
            except OSError:
                self._asks_gpus = False  # there is none
            except subprocess.TimeoutExpired:
                pass
        return {}


def _count() -> Counters:
    return counters(Path("/proc/stat").read_text(), Path("/proc/net/dev").read_text())
