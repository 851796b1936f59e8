"""Claims: records that reserve a name (``name=``) for one run, so that no other run saves checkpoints under it.

A claim is a small record in the folder or at the URL for checkpoints, which reserves a name (``name=``) for one run.
During the run, its driver renews the claim, since a run whose claim is not renewed counts as ended. The record is kept
in two files, which are written in turn. So one of the files is always complete, even if the driver is killed while
it writes the other, and no file needs to be overwritten atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import quote

from distributor.errors import ConfigurationError
from distributor.values import sealed
from distributor.values.files import fitted

#: The names of the two files of a claim.
FILES = ("claim-0.json", "claim-1.json")

Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class Identity:
    """A description of what a run trains, with which a later run of the same name is compared.

    Attributes:
        name: the run's name.
        resume: whether the user wants to continue an earlier training of this name: ``"auto"``, ``"must"`` or
            ``"never"``.
        target: name of the function or module, or the file name of the script.
        code: digest of the source code, or of the byte code if there is no source; a constant if a module is run.
        arguments: a digest of each argument, by its name or position.
        shown: each argument as text, for warnings. Arguments may be secret, so this text is not written to the claim
            (the record that reserves the name).
    """

    name: str
    resume: Resume
    target: str
    code: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Holder:
    """The holder of a name (the run that has reserved it), and this run's driver. No other run may use the name.

    Attributes:
        run: identifier of the run.
        host: the driver's host.
        machine: identifies the driver's machine or container.
        pid: the process ID of the driver.
        started: when the driver's process was started, in clock ticks since the machine's start.
    """

    run: str
    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"run {self.run} of process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Claim:
    """A claim: the record that says which run holds a name, and what this run trains.

    Attributes:
        sequence: number of this version of the record. It grows with every renewal.
        training: number of the training under this name. A run that starts over gets the next number.
        target, code, arguments: what this run trains, as in :class:`Identity`.
        finished: whether the training has ended with success.
        run: identifier of the run that holds the name now or, if no run does, of the last run that held it.
        holder: the run that holds the name now; ``None`` if no run does.
        attempt: number of the first attempt of the holder's current job. Ranks of the holder's earlier jobs may not
            commit checkpoints.
    """

    sequence: int
    training: int
    target: str
    code: str
    arguments: Mapping[str, str]
    finished: bool
    run: str
    holder: Holder | None
    attempt: int = 0

    def renewed(self) -> Claim:
        """Return the next version of the claim (the record that reserves a name), for the same job of the same run."""
        return replace(self, sequence=self.sequence + 1)

    def advanced(self, attempt: int) -> Claim:
        """Return the next version of the claim (the record that reserves a name), for another job of the same run."""
        return replace(self, sequence=self.sequence + 1, attempt=attempt)

    def released(self, *, finished: bool) -> Claim:
        """Return the next version of the claim (the record that reserves a name), in which no run holds the name."""
        return replace(self, sequence=self.sequence + 1, finished=finished, holder=None)


def find(fetch: Callable[[str], bytes | None]) -> Claim | None:
    """Return the newest version of a claim (the record that reserves a name); ``None`` if there is none.

    ``fetch`` returns the content of one of the claim's two files (:data:`FILES`), or ``None`` if the file is missing.
    """
    return read((fetch(FILES[0]), fetch(FILES[1])))


def read(files: tuple[bytes | None, bytes | None]) -> Claim | None:
    """Return the newest version of a claim (the record that reserves a name); ``None`` if there is none.

    ``files`` are the contents of the claim's two files; ``None`` stands for a missing file.
    """
    found = [claim for data in files if (claim := sealed.unseal(data, _build)) is not None]
    return max(found, key=lambda claim: claim.sequence, default=None)


def _build(told: dict[str, Any]) -> Claim:
    holder = told["holder"]
    return Claim(**{**told, "holder": None if holder is None else Holder(**holder)})


def folder_of(where: str, name: str) -> str:
    """Return the folder or URL of a name's claim (the record that reserves the name for one run).

    The folder is below ``where`` (the folder or URL that the user has given for checkpoints).

    >>> folder_of("/shared", "gpt 2"), folder_of("s3://bucket/runs", "../x")
    ('/shared/gpt%202', 's3://bucket/runs/%2E.%2Fx')
    """
    safe = quote(name, safe="+,=@")
    return f"{where.rstrip('/')}/{fitted(f'%2E{safe[1:]}' if safe.startswith('.') else safe)}"


def following(found: Claim | None, identity: Identity, holder: Holder) -> Claim:
    """Return the claim (the record that reserves a name) that a new run must write to reserve its name.

    Args:
        found: the claim of the last run with this name (that run has ended); ``None`` if no run has had the name.
        identity: what the new run trains.
        holder: the new run, with its driver process.

    Raises:
        ConfigurationError: ``resume="must"`` is given although there is no earlier training, or the new run should
            continue an earlier training that has finished or has another target.
    """
    name, again = identity.name, "pass resume='never' to start over, or another name"
    training = 1 if found is None else found.training
    if identity.resume == "never":
        training += found is not None
    elif found is None:
        if identity.resume == "must":
            raise ConfigurationError(
                f"resume='must', but there is no run named {name!r} to go on with: check name= and checkpoints=, or "
                "pass resume='auto'"
            )
    elif found.finished:
        raise ConfigurationError(f"the run named {name!r} has finished (run {found.run}): {again}")
    elif found.target != identity.target:
        raise ConfigurationError(
            f"the run named {name!r} trains with {found.target!r}, and not with {identity.target!r}: {again}"
        )
    sequence = 1 if found is None else found.sequence + 1
    return Claim(
        sequence, training, identity.target, identity.code, dict(identity.arguments), False, holder.run, holder
    )


def changes(found: Claim, identity: Identity) -> list[str]:
    """Return, in words, how a run (``identity``) differs from the last run with the same name (``found``).

    >>> old = Claim(1, 1, "train", "a", {"epochs": "1", "lr": "2"}, False, "3f2a", None)
    >>> changes(old, Identity("gpt", "auto", "train", "b", {"epochs": "3"}, {"epochs": "10"}))
    ['its code', 'epochs (now 10)', 'lr (now left out)']
    """
    told = ["its code"] if found.code != identity.code else []
    for name in sorted({*found.arguments, *identity.arguments}):
        if found.arguments.get(name) != identity.arguments.get(name):
            told.append(f"{name} (now {identity.shown.get(name, 'left out')})")
    return told


@dataclass(frozen=True)
class Fence:
    """The condition under which ranks may commit checkpoints: their run holds the claim that reserves its name.

    Attributes:
        place: the folder or URL where the claim (the record that reserves the run's name) is kept.
        run: identifier of the run that must hold the claim.
        attempt: number of the first attempt of the job whose ranks may commit checkpoints. Ranks of the run's earlier
            jobs may not commit any: some of these ranks may still run on nodes that are cut off from the driver.
    """

    place: str
    run: str
    attempt: int = 0


def training_folder(place: str, training: int) -> str:
    """Return the folder or URL for the checkpoints of one training. A run that starts over begins a new training.

    The folder is below ``place``, where the claim (the record that reserves the run's name) is kept.

    Args:
        place: the folder or URL of the claim.
        training: number of the training under the run's name, from 1. A run that continues an earlier training has the
            same number as the earlier run.
    """
    return f"{place.rstrip('/')}/{training}"
