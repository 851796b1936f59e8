"""What the model's process makes of a request."""

import os
import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from distributor.errors import ResourceError
from distributor.scoring import model
from distributor.scoring.model import answer, scoring
from distributor.scoring.wire import ScoreAnswer, ScoreRequest


def ask(score, rows=10, batch_rows=4, outputs=("y",), skips=False, pads=False, is_alone=True):
    inputs = {"x": np.arange(rows, dtype="float32")}
    return answer(score, ScoreRequest(inputs, rows, outputs, batch_rows, skips, pads, is_alone))


def test_batches_have_a_bounded_size_and_come_back_together():
    sizes = []

    def score(batch):
        sizes.append(len(batch["x"]))
        return batch["x"] * 2

    assert ask(score).outputs[0].tolist() == [2.0 * i for i in range(10)]
    assert sizes == [4, 4, 2]


@pytest.mark.parametrize("bad", [None, 3])
@pytest.mark.parametrize("form", [lambda kept: kept, list], ids=["tensor", "list"])
def test_a_function_may_use_its_outputs_memory_again(bad, form):
    kept = torch.empty(4)

    def score(batch):
        if bad in batch["x"].tolist():
            raise ValueError("three")
        rows = len(batch["x"])
        torch.mul(batch["x"], 2, out=kept[:rows])
        return form(kept[:rows])

    found = ask(score, skips=True).outputs[0]
    assert [float(each) for each in found] == [2.0 * i for i in range(10) if i != bad]


@pytest.mark.parametrize("skips", [True, False])
def test_rows_that_fail_are_wanted_again_since_the_model_may_have_changed_them(skips):
    def score(batch):
        batch["x"] += 100
        if 103 in batch["x"]:
            raise SystemExit("three") if skips else ValueError("three")
        return batch["x"]

    assert ask(score, skips=skips, is_alone=False) == ScoreAnswer(again=True)
    found = ask(score, skips=skips)
    assert list(found.failed) == [3]
    if skips:
        assert found.outputs[0].tolist() == [100 + i for i in range(10) if i != 3]
    assert list(ask(score, rows=4, batch_rows=3, is_alone=False).failed) == [3], "the only row of its batch"


@pytest.mark.parametrize("skips", [True, False])
def test_bad_rows_are_found(skips):
    def score(batch):
        if (batch["x"] % 5 == 3).any():
            raise ValueError("three")
        return batch["x"]

    found = ask(score, skips=skips)
    if skips:
        assert found.outputs[0].tolist() == [0, 1, 2, 4, 5, 6, 7, 9]
        assert sorted(found.failed) == [3, 8]
    else:
        assert list(found.failed) == [3]
        assert "ValueError: three" in found.failed[3]
        assert "in score" in found.failed[3]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda x: x[:-1], r"of shape \[3\]: the model must return one value for each row"),
        (lambda x: torch.tensor(1.0), r"of shape \[\]"),
        (lambda x: {"z": x}, "without the output 'y'"),
        (lambda x: (x, x), "2 values for the outputs y"),
        (lambda x: "text", "must be a tensor, an array or a list, not str"),
    ],
)
def test_outputs_of_another_form_are_an_error(returned, words):
    found = ask(lambda batch: returned(batch["x"]))
    assert found.outputs == ()
    assert re.search(words, found.error)


def test_columns_of_one_and_half_precision_become_plain_numbers():
    assert ask(lambda batch: batch["x"][:, None].bfloat16()).outputs[0].dtype == np.float32
    assert ask(lambda batch: batch["x"][:, None]).outputs[0].shape == (10, 1)


def test_a_module_gets_its_input_and_is_in_evaluation_mode():
    module = torch.nn.Dropout(0.9)
    assert scoring(module)({"x": torch.ones(3)}).tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="not int"):
        scoring(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_of_half_precision_takes_columns_of_float32(dtype):
    module = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).to(dtype)
    found = ask(lambda batch: scoring(module)({"x": batch["x"][:, None]}))
    with torch.inference_mode():
        expected = module(torch.arange(10.0)[:, None].to(dtype))
    assert found.outputs[0].tolist() == expected.tolist()


def scarce(room, sizes):
    """A model for which a GPU has memory for ``room`` rows."""

    def score(batch):
        sizes.append(len(batch["x"]))
        if len(batch["x"]) > room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return batch["x"] * 2

    return score


@pytest.mark.parametrize("skips", [True, False])
def test_a_batch_too_large_for_the_gpus_memory_is_halved(skips):
    found = ask(scarce(2, sizes := []), skips=skips)
    assert found.outputs[0].tolist() == [2.0 * i for i in range(10)]
    assert (found.failed, found.halved_rows, sizes) == ({}, 4, [4, 2, 2, 4, 2, 2, 2])
    assert ask(scarce(4, [])).halved_rows == 0


@pytest.mark.parametrize(
    ("room", "options", "rows", "calls"),
    [(1, {}, 2, 2), (1, {"skips": True}, 2, 2), (0, {"batch_rows": 1}, 1, 1), (2, {"pads": True}, 4, 1)],
)
def test_a_batch_is_halved_once_and_no_row_is_at_fault(room, options, rows, calls):
    found = ask(scarce(room, sizes := []), **options)
    assert f"memory does not suffice for a batch of {rows} rows: CUDA out of memory. Pass a smaller" in found.error
    assert (found.failed, len(sizes)) == ({}, calls)


@pytest.mark.parametrize(("lost", "ends"), [(True, -signal.SIGKILL), (False, 3)])
def test_a_process_whose_gpu_is_lost_ends(lost, ends):
    """After an illegal access CUDA refuses every later call: no row is at fault that comes then."""

    def synchronize():
        if lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def score(batch):
        raise RuntimeError("CUDA error: device-side assert triggered")

    pid = os.fork()
    if not pid:
        torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
        found = ask(score, skips=True)
        os._exit(3 if len(found.failed) == 10 else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ends


def test_a_gpus_errors_are_of_the_rows_whose_values_bring_them():
    class Late(torch.Tensor):
        def to(self, *args):
            raise ValueError("three")

    def score(batch):
        return batch["x"].as_subclass(Late) if 3 in batch["x"] else batch["x"]

    found = ask(score, skips=True)
    assert list(found.failed) == [3] and "three" in found.failed[3]


def test_a_module_needs_a_gpu_that_torch_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ResourceError, match=r"torch \S+ sees no GPU \(CUDA_VISIBLE_DEVICES=7, "):
        scoring(torch.nn.Identity(), on_gpu=True)
    assert scoring(len, on_gpu=True) is len


def test_a_module_and_its_inputs_are_moved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model, "GPU", "meta")
    module = torch.nn.Linear(2, 1)
    assert scoring(module, on_gpu=True)({"x": torch.ones(3, 2)}).device.type == "meta"
    assert module.weight.device.type == "meta"


def request(values, batch_rows=10, **options):
    options = {"outputs": ("y",), "skips": False} | options
    return ScoreRequest({"x": np.array(values, "float32")}, len(values), batch_rows=batch_rows, **options)


@pytest.mark.parametrize(
    ("requests", "groups"),
    [
        pytest.param([request([1]), request([2]), request([3])], [[0, 1, 2]], id="alike"),
        pytest.param([request([1] * 6), request([2] * 6), request([3] * 4)], [[0, 2], [1]], id="rows-of-one-batch"),
        pytest.param([request([1]), request([2], is_alone=True), request([3])], [[0, 2], [1]], id="alone"),
        pytest.param([request([1], pads=True), request([2], pads=True)], [[0], [1]], id="deterministic"),
        pytest.param([request([1]), request([[1, 2]]), request([3])], [[0, 2], [1]], id="other-shapes"),
        pytest.param([request([1]), request([1], skips=True)], [[0], [1]], id="other-errors"),
        pytest.param([], [], id="none"),
    ],
)
def test_requests_that_fit_into_a_batch_are_computed_together(requests, groups):
    assert model.together(requests) == groups


def test_each_request_gets_its_own_rows_of_a_batch():
    sizes = []

    def score(batch):
        sizes.append(len(batch["x"]))
        return batch["x"] * 2

    found = model.answers(score, [request([1, 2]), request([3]), request([4, 5])])
    assert [each.outputs[0].tolist() for each in found] == [[2, 4], [6], [8, 10]]
    assert sizes == [5]


def test_no_other_requests_rows_fail_with_one():
    def score(batch):
        if (batch["x"] == 3).any():
            raise ValueError("three")
        return batch["x"]

    requests = [request([1, 2]), request([3]), request([4])]
    assert model.answers(score, requests) == [ScoreAnswer(again=True)] * 3
    alone = [replace(each, is_alone=True) for each in requests]
    found = [model.answers(score, [alone[place]])[0] for (place,) in model.together(alone)]
    assert [[*each.failed] for each in found] == [[], [0], []]
    assert [each.outputs[0].tolist() for each in found if each.outputs] == [[1, 2], [4]]
