"""The variable that makes notebooks for GPUs run on CPUs."""

from __future__ import annotations

import pytest

from distributor import ConfigurationError
from distributor.compat.trial import cpu_ranks


def test_the_variable_must_be_a_number_of_ranks() -> None:
    assert cpu_ranks({"DISTRIBUTOR_COMPAT_CPU": " "}) is None
    for wrong in ("two", "0", "-1", "1.5"):
        with pytest.raises(ConfigurationError, match=f"DISTRIBUTOR_COMPAT_CPU must be the number .* not '{wrong}'"):
            cpu_ranks({"DISTRIBUTOR_COMPAT_CPU": wrong})
