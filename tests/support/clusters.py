"""A cluster over three hosts that tests share, and what is on its hosts."""

from __future__ import annotations

from typing import Any

from hosts import Hosts

from distributor.values.environment import CHECK_GPUS

#: Cores of each host: uneven, as clusters grow.
CORES = {"host-a": 3, "host-b": 1, "host-c": 2}

#: What discovery scripts report: numbers on host-a and host-c, UUIDs on host-b.
GPUS = {
    "host-a": ["0", "1", "2"],
    "host-b": ["GPU-8d1f4b1c-0000", "GPU-5c1b0a3e-0000", "GPU-5c1b0a3e-0001"],
    "host-c": ["0", "1", "2"],
}

#: What daemons have in their environment: a setting through which numbers go, AMD's on host-a, NVIDIA's on host-c.
#: None has a GPU, and ranks do not look.
ENVIRON = {
    "host-a": {CHECK_GPUS: "0", "HIP_VISIBLE_DEVICES": "4,6,7", "ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    "host-b": {CHECK_GPUS: "0"},
    "host-c": {CHECK_GPUS: "0", "CUDA_VISIBLE_DEVICES": "1,3,5"},
}


class Cluster:
    """Hosts, and at most one session on them: a new one only where a test asks for other settings."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._settings: dict[str, str] | None = None

    def session(self, settings: dict[str, str] | None = None) -> Any:
        """The session with such settings; executors take all cores of their hosts by default."""
        if self._settings != (settings or {}):
            self.stop()
            self._settings = dict(settings or {})
            return self.hosts.session(**self._settings)
        return self.hosts.active

    def stop(self) -> None:
        """Frees all executors."""
        self.hosts.stop_session()
        self._settings = None
