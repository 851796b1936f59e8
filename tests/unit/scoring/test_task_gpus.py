"""The GPUs of a model that a task feeds."""

import pytest

from distributor.errors import ResourceError
from distributor.machine import devices
from distributor.scoring.task_gpus import gpus_of_model


@pytest.fixture(autouse=True)
def nobody_looks(monkeypatch):
    monkeypatch.setattr(devices, "list_gpus", lambda: devices.Listing("nobody looks"))
    monkeypatch.setattr(devices, "has_amd", lambda: False)


@pytest.mark.parametrize(
    ("num_gpus", "addresses", "drivers", "setting", "expected"),
    [
        pytest.param(1, ["1"], [], None, ("1",), id="task"),
        pytest.param(1, ["1"], [], "4,6", ("6",), id="through-the-setting"),
        pytest.param(2, ["0", "1"], [], None, ("0", "1"), id="two"),
        pytest.param(1, ["GPU-aa"], [], None, ("GPU-aa",), id="uuid"),
        pytest.param(1, [], ["0", "1"], "4,6", ("6",), id="driver"),
        pytest.param(1, [], [], "4,6,7", ("4",), id="machine"),
        pytest.param(2, [], [], "4,6,7,9,11", ("7", "9"), id="two-of-the-machine"),
    ],
)
def test_the_gpus_of_a_model(monkeypatch, num_gpus, addresses, drivers, setting, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert gpus_of_model(num_gpus, addresses, drivers, partition=3) == expected


def test_too_few_gpus_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    words = r"num_gpus=2\): this task has 1 GPU \(CUDA_VISIBLE_DEVICES=4, nobody looks\): lower num_gpus"
    with pytest.raises(ResourceError, match=words):
        gpus_of_model(2, [], [], partition=0)
