"""Where ranks keep checkpoints, and how many. Environment variables pass these settings to ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distributor.errors import ConfigurationError
from distributor.values import codec
from distributor.values.checks import check_count, check_place
from distributor.values.lease_record import FencingToken

#: Names the folder or URL of checkpoints. Outside a run, users may set it.
PLACE = "DISTRIBUTOR_CHECKPOINTS"

#: All other settings of checkpoints, as JSON. Each run with a place for checkpoints sets it for its ranks.
SETTINGS = "DISTRIBUTOR_CHECKPOINT_SETTINGS"

#: The :class:`PeerAddress` of a node's agent, in the node's folder in shared memory.
PEERS = "peers.json"

#: The name of the thread in which a rank writes a checkpoint while it trains.
SAVING = "distributor-checkpoint"


@dataclass(frozen=True)
class Checkpoints:
    """Where a run keeps its checkpoints, and how many.

    Attributes:
        dir: a folder that all nodes see under this path, or an fsspec URL such as ``"s3://bucket/run"``.
        keep: number of newest checkpoints to keep (default 3); ``None`` keeps all. What ``save_checkpoint`` and
            ``checkpoint_folder`` wrote is counted separately.
        best: the name of a metric, and ``"min"`` or ``"max"``. The checkpoint with the best value of the metric is kept
            in addition to the newest ones; of equals, the oldest. A checkpoint's value is the one that rank 0 reported
            last before the save.
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
        # A frozen dataclass allows this only through object.__setattr__.
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
    """Check the option ``checkpoints``, and return it as :class:`Checkpoints`. A folder or URL is accepted too."""
    return value if isinstance(value, Checkpoints) else Checkpoints(check_place(name, value))


@dataclass(frozen=True)
class SharedMemory:
    """Where the ranks of a node keep their newest states in memory."""

    folder: str  # the run's, in the node's shared memory
    limit: int  # bytes of tensors in folder: of the node's states, and of copies from other nodes
    replicate: bool = False  # a node on another host keeps copies of this node's states


@dataclass(frozen=True)
class PeerKey:
    """The key for the connections over which ranks send copies of their states to other nodes, and read them back."""

    certificate: str = field(repr=False)  # PEM, of all agents of the run; ranks accept no other
    private: str = field(repr=False)  # PEM
    token: bytes = field(repr=False)  # proves to an agent that a rank belongs to the run


@dataclass(frozen=True)
class PeerAddress:
    """Where and how ranks of other nodes reach a node's agent."""

    address: str
    port: int
    certificate: str = field(repr=False)  # PEM
    token: str = field(repr=False)  # hexadecimal


def to_environ(
    checkpoints: Checkpoints,
    staging: str,
    hosts: Mapping[int, str],
    memory: SharedMemory | None = None,
    fence: FencingToken | None = None,
) -> dict[str, str]:
    """Return the variables that tell a node's ranks where and how to keep checkpoints; ``hosts`` are for errors."""
    in_memory = replace(checkpoints, memory=memory is not None, replicate=memory is not None and memory.replicate)
    return {
        PLACE: checkpoints.dir,
        SETTINGS: codec.pack(Settings(in_memory, staging, hosts, True, memory, fence)).decode(),
    }


@dataclass(frozen=True)
class Settings:
    """Where one process, such as a rank, keeps checkpoints, and how."""

    checkpoints: Checkpoints
    staging: str | None  # for files on their way to a URL; None: the system's temporary folder
    hosts: Mapping[int, str]  # by GROUP_RANK, of node 0 and this node; empty outside a run
    is_given: bool  # a run or the user has set dir; otherwise it is "checkpoints"
    memory: SharedMemory | None = None
    fence: FencingToken | None = None  # None outside a run, or without a name


def from_environ(environ: Mapping[str, str]) -> Settings:
    """Read the settings for checkpoints from environment variables. The default folder is ``checkpoints``.

    >>> from_environ({}).checkpoints
    Checkpoints(dir='checkpoints', keep=3, best=None, memory=False, replicate=False)
    """
    place = environ.get(PLACE) or "checkpoints"
    if SETTINGS not in environ:
        return Settings(Checkpoints(place), None, {}, bool(environ.get(PLACE)))
    settings = codec.read(Settings, environ[SETTINGS])
    return replace(settings, checkpoints=replace(settings.checkpoints, dir=place))


def absolute(checkpoints: Checkpoints) -> Checkpoints:
    """Return ``checkpoints`` with an absolute path as ``dir``. If ``dir`` is a URL, it stays as it is."""
    if "://" in checkpoints.dir:
        return checkpoints
    return replace(checkpoints, dir=os.path.abspath(os.path.expanduser(checkpoints.dir)))
