"""Where ranks keep checkpoints, and how many. Environment variables pass these settings to ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from distributor.errors import ConfigurationError
from distributor.values.checks import check_count, check_place
from distributor.values.claims import Fence

#: The environment variable that names the folder or URL of checkpoints. Outside a run, users may set it.
PLACE = "DISTRIBUTOR_CHECKPOINTS"

#: The environment variable that holds all settings of checkpoints except their place, as JSON. Each run that has a
#: place for checkpoints sets it for its ranks.
SETTINGS = "DISTRIBUTOR_CHECKPOINT_SETTINGS"

#: The file that holds the address, certificate and token of a node's agent. The file is in the node's folder in shared
#: memory. The ranks of all nodes exchange these addresses, to send copies of their states to the agents of other nodes.
PEERS = "peers.json"


@dataclass(frozen=True)
class Checkpoints:
    """Where a run keeps its checkpoints, and how many.

    Attributes:
        dir: a folder that all nodes see under this path, or an fsspec URL such as ``"s3://bucket/run"``.
        keep: number of newest checkpoints to keep (default 3); ``None`` keeps all.
        best: the name of a metric, and ``"min"`` or ``"max"``. The checkpoint with the best value of the metric is kept
            in addition to the newest ones. A checkpoint's value is the one that rank 0 reported last before the save.
        memory: whether each call of ``save_checkpoint`` also keeps the state in the nodes' shared memory until the run
            ends. If the ranks are restarted (``max_restarts``), they load the state from there.
        replicate: whether each state in memory is also copied to the memory of a node on another host (only with
            ``memory=True``). If a host is lost and the ranks are restarted, they load the copies.

    Raises:
        ConfigurationError: a value is wrong.

    Example:
        >>> Checkpoints("/shared/run", keep=2, best=("val_loss", "min"))
        Checkpoints(dir='/shared/run', keep=2, best=('val_loss', 'min'), memory=False, replicate=False)
    """

    dir: str
    keep: int | None = 3
    best: tuple[str, Literal["min", "max"]] | None = None
    memory: bool = False
    replicate: bool = False

    def __post_init__(self) -> None:
        # The checked value replaces the given one. A frozen dataclass allows this only through object.__setattr__.
        object.__setattr__(self, "dir", check_place("checkpoints", self.dir))
        if self.keep is not None:
            object.__setattr__(self, "keep", check_count("Checkpoints(keep=...)", self.keep))
        object.__setattr__(self, "best", _check_best(self.best))
        for name, value in (("memory", self.memory), ("replicate", self.replicate)):
            if not isinstance(value, bool):
                raise ConfigurationError(f"Checkpoints({name}=...) must be True or False, not {value!r}")
        if self.replicate and not self.memory:
            raise ConfigurationError(
                "Checkpoints(replicate=True) copies what memory=True keeps: pass Checkpoints(..., memory=True, "
                "replicate=True)"
            )


def _check_best(best: Any) -> tuple[str, Literal["min", "max"]] | None:
    if best is None:
        return None
    if (
        isinstance(best, (tuple, list))
        and len(best) == 2
        and isinstance(best[0], str)
        and best[0]
        and best[1] in ("min", "max")
    ):
        return best[0], best[1]
    raise ConfigurationError(
        "Checkpoints(best=...) must be the name of a metric and 'min' or 'max', such as ('val_loss', 'min'), not "
        f"{best!r}"
    )


def check_checkpoints(name: str, value: Any) -> Checkpoints:
    """Check the option ``checkpoints``, and return it as :class:`Checkpoints`. A folder or URL is accepted too.

    Raises:
        ConfigurationError: the value is neither :class:`Checkpoints` nor a folder or URL.
    """
    return value if isinstance(value, Checkpoints) else Checkpoints(check_place(name, value))


@dataclass(frozen=True)
class SharedMemory:
    """Where the ranks of a node keep their newest states (the arguments of ``save_checkpoint``) in memory.

    Attributes:
        folder: a private folder of the run in the node's shared memory.
        limit: maximum total size, in bytes, of the tensors in ``folder`` (in the states of the node's ranks, and in
            copies from other nodes).
        replicate: whether a node on another host keeps copies of the states of this node's ranks.
    """

    folder: str
    limit: int
    replicate: bool = False


@dataclass(frozen=True)
class PeerKey:
    """The key for the connections over which ranks send copies of their states to other nodes, and read them back.

    Attributes:
        certificate: the certificate (PEM) of all agents of the run. Ranks accept no other certificate.
        private: the private key of the certificate (PEM).
        token: the secret with which ranks prove to an agent that they belong to the run.
    """

    certificate: str = field(repr=False)
    private: str = field(repr=False)
    token: bytes = field(repr=False)


def to_environ(
    checkpoints: Checkpoints,
    staging: str,
    hosts: Mapping[int, str],
    memory: SharedMemory | None = None,
    fence: Fence | None = None,
) -> dict[str, str]:
    """Return the environment variables that tell the ranks of a node where and how to keep checkpoints.

    Args:
        checkpoints: where the run keeps checkpoints, and how many.
        staging: a private folder of the node, for files on their way to a URL.
        hosts: the name of each node's host by node rank, for error texts.
        memory: where ranks keep their newest states in memory; ``None`` if they keep none there.
        fence: the claim (the record that reserves the run's name) that the run must still hold when its ranks commit a
            checkpoint; ``None`` for a run without a name.
    """
    settings = {
        "keep": checkpoints.keep,
        "best": checkpoints.best,
        "staging": staging,
        "hosts": {str(node): host for node, host in hosts.items()},
        "memory": None if memory is None else asdict(memory),
        "fence": None if fence is None else asdict(fence),
    }
    return {PLACE: checkpoints.dir, SETTINGS: json.dumps(settings)}


@dataclass(frozen=True)
class Settings:
    """Where one process, such as a rank, keeps checkpoints, and how.

    Attributes:
        checkpoints: where checkpoints are kept, and how many.
        staging: folder for files on their way to a URL; ``None`` for the system's folder for temporary files.
        hosts: the name of each node's host by node rank; empty outside a run.
        is_given: whether a run or the user has set ``checkpoints.dir``. If not, ``dir`` is ``"checkpoints"``.
        memory: where ranks keep their newest states in memory; ``None`` if they keep none there.
        fence: the claim (the record that reserves the run's name) that the run must still hold when its ranks commit a
            checkpoint; ``None`` outside a run, or for a run without a name.
    """

    checkpoints: Checkpoints
    staging: str | None
    hosts: Mapping[int, str]
    is_given: bool
    memory: SharedMemory | None = None
    fence: Fence | None = None


def from_environ(environ: Mapping[str, str]) -> Settings:
    """Read the settings for checkpoints from environment variables. The default folder is ``checkpoints``.

    >>> from_environ({}).checkpoints
    Checkpoints(dir='checkpoints', keep=3, best=None, memory=False, replicate=False)
    """
    told = json.loads(environ.get(SETTINGS, "{}"))
    place = environ.get(PLACE) or "checkpoints"
    best, fence = told.get("best"), told.get("fence")
    memory = None if told.get("memory") is None else SharedMemory(**told["memory"])
    return Settings(
        Checkpoints(
            place,
            told.get("keep", 3),
            None if best is None else (best[0], best[1]),
            memory is not None,
            memory is not None and memory.replicate,
        ),
        told.get("staging"),
        {int(node): host for node, host in told.get("hosts", {}).items()},
        bool(environ.get(PLACE)),
        memory,
        None if fence is None else Fence(**fence),
    )


def absolute(checkpoints: Checkpoints) -> Checkpoints:
    """Return ``checkpoints`` with an absolute path as ``dir``. If ``dir`` is a URL, it stays as it is."""
    if "://" in checkpoints.dir:
        return checkpoints
    return replace(checkpoints, dir=os.path.abspath(os.path.expanduser(checkpoints.dir)))
