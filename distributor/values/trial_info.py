"""Which trial of a search a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrialInfo:
    """The trial of a search that a run is.

    Attributes:
        number: counts the trials of a study from 0.
        params: the parameters that the search has chosen.
        study: the name of the study.
        study_id: identifies the study. It stays the same if another driver goes on with it.
    """

    number: int
    params: Mapping[str, Any]
    study: str
    study_id: str
