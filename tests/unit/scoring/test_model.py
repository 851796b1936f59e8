"""What the model's process makes of a request."""

import re

import numpy as np
import pytest
import torch

from distributor.scoring.model import answer, scoring
from distributor.scoring.wire import ScoreRequest


def ask(score, rows=10, batch_rows=4, outputs=("y",), skips=False):
    return answer(score, ScoreRequest({"x": np.arange(rows, dtype="float32")}, rows, outputs, batch_rows, skips))


def test_batches_have_a_bounded_size_and_come_back_together():
    sizes = []

    def score(batch):
        sizes.append(len(batch["x"]))
        return batch["x"] * 2

    assert ask(score).outputs[0].tolist() == [2.0 * i for i in range(10)]
    assert sizes == [4, 4, 2]


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
