"""The tree of exceptions."""

import inspect
import logging
import pickle
import re
import sys
import threading
import traceback

import pytest

import distributor
from distributor import errors
from distributor.values.outcome import Failure

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__
]
FAILURES = (
    Failure(1, 0, "host-b", "ValueError", "ValueError: no", "Traceback", 1, None, 2.5, "tail", b"pickled"),
    Failure(0, 0, "host-a", "signal", "killed by SIGKILL", signal="SIGKILL"),
)
PLAIN = [kind for kind in CLASSES if not issubclass(kind, errors.TrainingError)]
TRAINING = [kind for kind in CLASSES if issubclass(kind, errors.TrainingError)]


def documented_tree():
    """Base classes by class, from the drawing in the module's docstring; its columns are four wide."""
    drawing = inspect.getdoc(errors).partition("::\n")[2].strip("\n").partition("\n\n")[0]
    tree, above = {}, []
    for line in inspect.cleandoc(drawing).splitlines():
        lines, name, extra = re.match(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?", line).groups()
        depth = len(lines) // 4
        tree[name] = tuple(filter(None, [above[depth - 1] if depth else None, extra]))
        above[depth:] = [name]
    return tree


def test_the_documented_tree_is_the_real_one():
    assert documented_tree() == {kind.__name__: tuple(base.__name__ for base in kind.__bases__) for kind in CLASSES}


@pytest.mark.parametrize("kind", CLASSES)
def test_all_are_exported_and_documented(kind):
    assert getattr(distributor, kind.__name__) is kind
    assert kind.__name__ in distributor.__all__
    assert kind.__doc__


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_errors_survive_pickling(kind, protocol):
    copy = pickle.loads(pickle.dumps(kind("what, and why"), protocol))
    assert type(copy) is kind
    assert str(copy) == "what, and why"


@pytest.mark.parametrize("failures", [FAILURES, FAILURES[1:], ()], ids=["two", "signal", "none"])
@pytest.mark.parametrize("kind", TRAINING)
def test_training_errors_survive_pickling_with_their_attributes(kind, failures):
    error = kind("rank 1 failed", failures)
    error.user = "added later"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "rank 1 failed"
    assert vars(copy) == vars(error)
    assert copy.failures == failures


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        (FAILURES, (1, 0, "host-b", 1, None, "Traceback", "tail")),
        (FAILURES[1:], (0, 0, "host-a", None, "SIGKILL", "", "")),
        ((), (None, None, None, None, None, "", "")),
    ],
)
def test_attributes_are_those_of_the_root(failures, expected):
    error = errors.TrainingError("text", list(failures))
    names = ("rank", "local_rank", "host", "exit_code", "signal", "traceback", "log_tail")
    assert tuple(getattr(error, name) for name in names) == expected


def test_the_original_exception_is_there_and_not_printed(capfd, caplog):
    """The text has told it: neither the interpreter nor ``logging`` begins with it."""
    error = errors.TrainingError("rank 1 failed: ValueError: no", FAILURES, ValueError("no"))
    assert isinstance(error.__cause__, ValueError)
    try:
        raise error
    except errors.TrainingError as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)
        logging.getLogger("user").exception("training")
    for text in (capfd.readouterr().err, caplog.text):
        assert text.count("ValueError: no") == 1
        assert "direct cause" not in text


def test_a_cause_that_a_user_sets_is_printed(capfd):
    error = errors.TrainingError("rank 1 failed: ValueError: no", FAILURES, ValueError("no"))
    with pytest.raises(errors.TrainingError) as caught:
        raise error from OSError("the disk is full")
    assert isinstance(error.__cause__, OSError)
    traceback.print_exception(caught.value)
    assert capfd.readouterr().err.startswith("OSError: the disk is full\n\nThe above exception was the direct cause")


def test_an_original_exception_that_cannot_be_pickled_is_left_behind():
    error = errors.TrainingError("rank 1 failed", FAILURES, ValueError(threading.Lock()))
    assert pickle.loads(pickle.dumps(error)).__cause__ is None


def test_except_clauses_for_pyspark_keep_working():
    assert all(issubclass(kind, RuntimeError) for kind in CLASSES)
    assert {kind for kind in CLASSES if issubclass(kind, ValueError)} == {
        errors.ConfigurationError,
        errors.PayloadError,
        errors.ResourceError,
    }
