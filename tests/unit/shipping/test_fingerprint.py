"""Functions that do the same have one fingerprint."""

import functools
import importlib
import sys

import numpy as np
import pytest
import torch

from distributor.shipping.fingerprint import fingerprint

CELL = """
import functools
import torch

class Net(torch.nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = torch.nn.Linear(width, 1)

    @functools.cached_property
    def depth(self):
        return "deep"

    def forward(self, x):
        return self.linear(x) + scaled(BIAS)

@functools.lru_cache
def scaled(value):
    return value * 10 if value else scaled(1)

@functools.singledispatch
def kind(value):
    return "other"

@kind.register
def _(value: list):
    return [kind(each) for each in value]

def fact(n):
    return 1 if n < 2 else n * fact(n - 1)

def load():
    return Net() if kind(fact(3)) in {1, 6, "six"} else (lambda batch: None)
"""


def cell(width=2, bias=1, above="", file="<cell 1>", **texts):
    code = above + CELL
    for old, new in texts.items():
        code = code.replace(old, new)
    names = {"__name__": "__main__", "WIDTH": width, "BIAS": bias}
    exec(compile(code, file, "exec"), names)
    return names["load"]


def test_a_cell_that_is_run_again_is_the_same():
    assert fingerprint(cell()) == fingerprint(cell()) == fingerprint(cell(above="\n\n# moved\n", file="<cell 7>"))


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 3},
        {"bias": 2},
        {"forward": "forwards"},
        {"six": "seven"},
        {"fact(n - 1)": "fact(n - 2)"},
        {"* 10": "* 20"},
        {"deep": "deeper"},
        {"other": "another"},
        {"in value]": "in value[1:]]"},
    ],
)
def test_other_code_or_values_are_another(changes):
    assert fingerprint(cell(**changes)) != fingerprint(cell())


CLASSES = """
import abc, collections, dataclasses, enum, types, typing

@dataclasses.dataclass
class Data:
    size: int = SIZE
    names: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    size: int = SIZE

class Enum(enum.Enum):
    SIZE = SIZE

class Tuple(typing.NamedTuple):
    size: int = SIZE

class Abstract(abc.ABC):
    @abc.abstractmethod
    def size(self):
        return SIZE

class Table:
    sizes = types.MappingProxyType({"size": SIZE})
    kinds = types.MappingProxyType, type(None), types.FunctionType
"""


@pytest.mark.parametrize("name", ["Data", "Frozen", "Enum", "Tuple", "Abstract", "Table"])
def test_a_class_of_a_cell_that_is_run_again_is_the_same(name):
    def found(size):
        names = {"__name__": "__main__", "SIZE": size}
        exec(compile(CLASSES, "<cell>", "exec"), names)
        return fingerprint(closed_over(names[name]))

    assert found(1) == found(1) != found(2)


@pytest.mark.parametrize("files", [["__init__.py"], []], ids=["package", "namespace-package"])
def test_a_package_is_the_same_in_another_folder(files, tmp_path, monkeypatch):
    def found(folder, code):
        (tmp_path / folder / "user_package").mkdir(parents=True)
        for name in (*files, "model.py"):
            (tmp_path / folder / "user_package" / name).write_text(code if name == "model.py" else "")
        with monkeypatch.context() as context:
            context.syspath_prepend(tmp_path / folder)
            for name in ("user_package", "user_package.model"):
                context.delitem(sys.modules, name, raising=False)
            importlib.import_module("user_package.model")
            try:
                return fingerprint(closed_over(sys.modules["user_package"]))
            finally:
                del sys.modules["user_package"], sys.modules["user_package.model"]

    size = "def size():\n    return {}\n"
    assert found("one", size.format(3)) == found("two", size.format(3)) != found("three", size.format(4))


def closed_over(value):
    return lambda: value


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ([1, "a"], [1, "".join(["a"])], [1, "b"]),
        ({"a", "b", "c"}, {"c", "b", "a"}, {"a", "b"}),
        (np.arange(5), np.arange(5), np.arange(5) * 2),
        (torch.arange(5.0), torch.arange(5.0), torch.arange(5.0) + 1),
        (np.zeros(1 << 20), np.zeros(1 << 20), np.ones(1 << 20)),
        (functools.partial(max, 1), functools.partial(max, 1), functools.partial(max, 2)),
    ],
)
def test_values_count_and_not_their_identity(one, same, other):
    assert fingerprint(closed_over(one)) == fingerprint(closed_over(same))
    assert fingerprint(closed_over(one)) != fingerprint(closed_over(other))


def test_what_is_within_a_try_statement_counts():
    """Also where Python compiles both to the same instructions."""

    def inside(first, second):
        try:
            first()
            second()
        except ValueError:
            return

    def beside(first, second):
        try:
            first()
        except ValueError:
            return
        else:
            second()

    assert fingerprint(inside) != fingerprint(beside)


def test_values_may_contain_themselves():
    def made(end):
        whole = [1]
        whole += [whole, end]
        return whole

    assert fingerprint(closed_over(made(1))) == fingerprint(closed_over(made(1)))
    assert fingerprint(closed_over(made(1))) != fingerprint(closed_over(made(2)))
