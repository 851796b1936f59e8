"""The record of a lease, which gives one run a name or a folder: no other run saves checkpoints there.

A run whose driver does not renew its lease counts as ended. The two files of the record are written in turn: one is
always complete, even if the driver is killed while it writes the other, and no store has to overwrite atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import quote

from distributor.errors import ConfigurationError
from distributor.values import sealed
from distributor.values.files import fitted

#: The names of the two files of a record.
FILES = ("lease-0.json", "lease-1.json")

Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class Identity:
    """What a run trains, with which a later run of the same name is compared."""

    name: str
    resume: Resume
    target: str  # name of the function or module, or file name of the script
    code: str = ""  # digest of the source or, without it, of the byte code; a constant for a module
    arguments: Mapping[str, str] = field(default_factory=dict)  # a digest of each, by its name or position
    shown: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # for warnings; may be secret: not for the record


@dataclass(frozen=True)
class Holder:
    """The run that holds a name or folder, and its driver."""

    run: str
    host: str
    machine: str  # or container
    pid: int
    started: str  # the process, in clock ticks since the machine's start

    def __str__(self) -> str:
        return f"run {self.run} of process {self.pid} on {self.host}"


@dataclass(frozen=True)
class LeaseRecord:
    """Which run holds a name or folder, and what it trains."""

    sequence: int  # grows with every renewal
    training: int  # number of the training under this name; a run that starts over gets the next one
    target: str  # empty in the record of a folder
    code: str
    arguments: Mapping[str, str]
    finished: bool  # with success
    run: str  # the holder, or the last one
    holder: Holder | None  # None: no run is the holder
    attempt: int = 0  # the first of the holder's current job: ranks of its earlier jobs may not commit

    def renewed(self) -> LeaseRecord:
        return replace(self, sequence=self.sequence + 1)

    def advanced(self, attempt: int) -> LeaseRecord:
        """Return the next version, for another job of the same run."""
        return replace(self, sequence=self.sequence + 1, attempt=attempt)

    def released(self, *, finished: bool) -> LeaseRecord:
        return replace(self, sequence=self.sequence + 1, finished=finished, holder=None)


def find(fetch: Callable[[str], bytes | None]) -> LeaseRecord | None:
    """Return the newest version of a record, whose files ``fetch`` reads; ``None`` if there is none."""
    records = [record for name in FILES if (record := sealed.unseal(LeaseRecord, fetch(name))) is not None]
    return max(records, key=lambda record: record.sequence, default=None)


def folder_of(where: str, name: str) -> str:
    """Return the folder or URL of a name's record, below the one for checkpoints.

    >>> folder_of("/shared", "gpt 2"), folder_of("s3://bucket/runs", "../x")
    ('/shared/gpt%202', 's3://bucket/runs/%2E.%2Fx')
    """
    safe = quote(name, safe="+,=@")
    return f"{where.rstrip('/')}/{fitted(f'%2E{safe[1:]}' if safe.startswith('.') else safe)}"


def following(last: LeaseRecord | None, identity: Identity, holder: Holder) -> LeaseRecord:
    """Return the record of a new run after that of the last; ConfigurationError if they, or ``resume``, do not fit."""
    name, again = identity.name, "pass resume='never' to start over, or another name"
    training = 1 if last is None else last.training
    if identity.resume == "never":
        training += last is not None
    elif last is None:
        if identity.resume == "must":
            raise ConfigurationError(
                f"resume='must', but there is no run named {name!r} to go on with: check name= and checkpoints=, or "
                "pass resume='auto'"
            )
    elif last.target not in (identity.target, ""):
        raise ConfigurationError(
            f"the run named {name!r} trains with {last.target!r}, and not with {identity.target!r}: {again}"
        )
    elif last.finished and not changes(last, identity):
        raise ConfigurationError(
            f"the run named {name!r} has finished (run {last.run}) with these arguments: {again}. With other "
            "arguments, such as more epochs, it goes on from its last checkpoint"
        )
    sequence = 1 if last is None else last.sequence + 1
    return LeaseRecord(
        sequence, training, identity.target, identity.code, dict(identity.arguments), False, holder.run, holder
    )


def taken(last: LeaseRecord | None, holder: Holder) -> LeaseRecord:
    """Return the record of a new run without a name, after that of the last in its folder."""
    if last is None:
        return LeaseRecord(1, 1, "", "", {}, False, holder.run, holder)
    return replace(last, sequence=last.sequence + 1, run=holder.run, holder=holder, attempt=0)


def changes(last: LeaseRecord, identity: Identity) -> list[str]:
    """Return, in words, how a run differs from the last one of its name.

    >>> old = LeaseRecord(1, 1, "train", "a", {"epochs": "1", "lr": "2"}, False, "3f2a", None)
    >>> changes(old, Identity("gpt", "auto", "train", "b", {"epochs": "3"}, {"epochs": "10"}))
    ['its code', 'epochs (now 10)', 'lr (now left out)']
    """
    differences = ["its code"] if last.code != identity.code else []
    for name in sorted({*last.arguments, *identity.arguments}):
        if last.arguments.get(name) != identity.arguments.get(name):
            differences.append(f"{name} (now {identity.shown.get(name, 'left out')})")
    return differences


@dataclass(frozen=True)
class FencingToken:
    """The condition under which ranks may commit checkpoints: their run holds its lease, for their job."""

    place: str  # of the record
    run: str
    attempt: int = 0  # first of their job; ranks of earlier jobs may live on, cut off from the driver
    is_named: bool = True  # otherwise, the driver need not see the same folder as the ranks


def training_folder(place: str, training: int) -> str:
    """Return the folder or URL for the checkpoints of one training, counted from 1, below its record's."""
    return f"{place.rstrip('/')}/{training}"
