"""Find the checkpoints that ``load_checkpoint(folder=...)`` asks for: by a folder, a URL, or the name of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass

from distributor.checkpoint import records
from distributor.checkpoint.catalog import Catalog
from distributor.errors import ConfigurationError
from distributor.machine.storage import is_url, open_storage
from distributor.values import lease_record
from distributor.values.checkpoints import Checkpoints, Settings, absolute


@dataclass(frozen=True)
class CheckpointPlace:
    """Where checkpoints are."""

    place: str  # a folder or URL
    only: str | None = None  # the folder there of the one that was asked for; None: all will do


def find(folder: str, settings: Settings) -> CheckpointPlace:
    """Return where the checkpoints are, also such as cannot be read. Of a named run, it is that of its newest training.

    ConfigurationError: there are none, or they belong to several runs. It says where this function has looked.
    """
    places = [folder if is_url(folder) else os.path.abspath(os.path.expanduser(folder))]
    if not is_url(folder) and not os.path.isabs(folder):  # perhaps the name of a run
        places.append(lease_record.folder_of(_root(settings), folder))
    looked = []
    above, _, name = places[0].rstrip("/").rpartition("/")
    if records.origin_of(name) is not None and Catalog(open_storage(above), Checkpoints(above), only=name).has_any():
        return CheckpointPlace(above, name)
    for place in places:
        if (training := _training(place)) is not None:
            place = lease_record.training_folder(place, training)
        if Catalog(open_storage(place), Checkpoints(place)).has_any():
            return CheckpointPlace(place)
        looked.append(repr(place))
    instead = named_runs(places[0]) or ": pass the folder or URL that a run had as checkpoints=, or the run's name"
    raise ConfigurationError(f"load_checkpoint: there is no checkpoint in {' or '.join(looked)}{instead}")


def named_runs(place: str) -> str:
    """Return a hint for the text of an error or a warning if a place has the folders of named runs; else ``""``."""
    runs = (f"{place.rstrip('/')}/{name}" for name in sorted(open_storage(place).folders()))
    listed = ", ".join(repr(run) for run in runs if _training(run) is not None)
    return f", which has the folders of named runs: pass folder={listed}" if listed else ""


def _training(place: str) -> int | None:
    """Return the number of the newest training of the named run whose place this is; ``None`` if it is none's."""
    record = lease_record.find(open_storage(place).read)
    return None if record is None or not record.target else record.training


def _root(settings: Settings) -> str:
    """Return the place below which named runs keep their checkpoints."""
    if settings.fence is not None and settings.fence.is_named:
        return settings.fence.place.rpartition("/")[0]
    return absolute(settings.checkpoints).dir
