"""Which configurations of Accelerate suit a run, without Accelerate."""

from __future__ import annotations

import pytest

from distributor.errors import ConfigurationError
from distributor.launch.accelerate.configuration import check


def settings(kind: str = "NO", where: str = "LOCAL_MACHINE", use_cpu: bool = False) -> dict[str, object]:
    return {"config": "a.yaml", "kind": kind, "where": where, "use_cpu": use_cpu}


@pytest.mark.parametrize(
    ("kind", "where", "use_cpu", "use_gpu", "reason"),
    [
        ("NO", "AMAZON_SAGEMAKER", False, True, "AMAZON_SAGEMAKER, which is not supported"),
        ("XLA", "LOCAL_MACHINE", False, False, "XLA, which is not supported"),
        ("DEEPSPEED", "LOCAL_MACHINE", False, True, r"launch=DeepSpeed\(config\)"),
        ("NO", "LOCAL_MACHINE", True, True, "use_cpu: true, but the run has use_gpu=True"),
        ("FSDP", "LOCAL_MACHINE", False, False, "FSDP, which needs GPUs"),
    ],
)
def test_a_configuration_that_does_not_suit_the_run_is_refused(
    kind: str, where: str, use_cpu: bool, use_gpu: bool, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check(settings(kind, where, use_cpu), use_gpu)


@pytest.mark.parametrize(("kind", "use_cpu", "use_gpu"), [("NO", True, False), ("FSDP", False, True)])
def test_a_configuration_that_suits_the_run_is_accepted(kind: str, use_cpu: bool, use_gpu: bool) -> None:
    check(settings(kind, use_cpu=use_cpu), use_gpu)
