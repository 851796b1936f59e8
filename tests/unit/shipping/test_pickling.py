"""Functions, values and exceptions as bytes. What is "elsewhere" here is a Python that lacks the user's modules."""

import ast
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import types

import cloudpickle
import pytest
from hypothesis import given, strategies as st

from distributor.errors import PayloadError, ResultError
from distributor.shipping import pickling

USER_CODE = """
import enum, functools, math, threading
from dataclasses import dataclass
from typing import NamedTuple

FACTOR = 10
LOCK = threading.Lock()

def helper(x):
    return FACTOR * x

def train(x, *, plus=0):
    return helper(x) + plus

def factorial(n):
    return n * factorial(n - 1) if n else 1

def closure(offset):
    def inner(x):
        return helper(x) + offset
    return inner

def with_lock():
    return LOCK

def nested():
    def inner():
        return [LOCK for _ in range(2)]
    return inner()

def indirect():
    return again(), with_lock()

def again():
    return indirect()

class Locked:
    def __call__(self):
        return LOCK

def with_default(x, lock=threading.Lock(), plus=0):
    return lock

def with_keyword_default(*, lock=threading.Lock()):
    return lock

square = lambda x: x * x
partial = functools.partial(train, 2, plus=3)

class Trainer:
    def __init__(self, start):
        self.start = start

    def train(self, x):
        return helper(x) + self.start

    @classmethod
    def make(cls, x):
        return cls(x).start

    __call__ = train

@dataclass
class Config:
    rate: float

class Phase(enum.Enum):
    WARM = 1

def results():
    return Config(0.5), Phase.WARM, Trainer

class Slotted:
    __slots__ = ("rate", "__hidden")

    def __init__(self, rate):
        self.rate = self.__hidden = rate

    def hidden(self):
        return self.__hidden

@dataclass(slots=True)
class SlottedConfig:
    rate: float = 0.5

class Pair(NamedTuple):
    rate: float
    depth: int = 2

def slotted():
    return Slotted(0.5), SlottedConfig(0.25), Pair(0.125)

@functools.lru_cache(maxsize=7)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Lazy:
    @functools.cached_property
    def width(self):
        return helper(4)

def cached():
    return fibonacci(30), fibonacci.cache_parameters()["maxsize"], (lazy := Lazy()).width, vars(lazy)

@functools.singledispatch
def kind(value):
    return "other"

@kind.register
def _(value: list):
    return [kind(each) for each in value]

kind.register(int, lambda value: "int")

class Diverged(Exception):
    pass

def diverge():
    raise Diverged("loss", math.inf)

def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner

@logged
def sums(rows):
    return [sum(x for x in row) for row in rows]

@logged
def sums_locked():
    return LOCK

locked = Locked()
"""

names = (f"user_module_{number}" for number in itertools.count())


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A module that the user wrote: loaded here, to be found nowhere else."""
    name = next(names)
    (tmp_path / f"{name}.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


CALL = """
import importlib.util, sys
from distributor.shipping import pickling
assert not any(name.startswith("user_module") for name in sys.modules)
assert importlib.util.find_spec({package!r}) is None
function, args, kwargs = pickling.load_function("/dev/stdin")
try:
    pickling.dump_value(function(*args, **kwargs), sys.stdout.buffer)
except Exception as error:
    sys.stdout.buffer.write(pickling.dump_exception(error))
"""


def call_elsewhere(module, pickled):
    """The bytes of what a call gives in another process."""
    # The root folder: the current directory is on the import path of python -c.
    command = [sys.executable, "-c", CALL.format(package=module.__name__.partition(".")[0])]
    with tempfile.TemporaryFile() if isinstance(pickled, bytes) else pickled as file:
        if isinstance(pickled, bytes):
            file.write(pickled)
        file.seek(0)
        return subprocess.run(command, stdin=file, stdout=subprocess.PIPE, cwd=os.sep, check=True).stdout


@pytest.mark.parametrize(
    ("expression", "args", "kwargs", "expected"),
    [
        pytest.param("train", (4,), {"plus": 2}, 42, id="function"),
        pytest.param("factorial", (5,), {}, 120, id="recursive"),
        pytest.param("cached", (), {}, (832040, 7, 40, {"width": 40}), id="cached"),
        pytest.param("fibonacci", (30,), {}, 832040, id="cached-and-recursive"),
        pytest.param("kind", ([1, "a"],), {}, ["int", "other"], id="dispatched"),
        pytest.param("closure(7)", (1,), {}, 17, id="closure"),
        pytest.param("square", (3,), {}, 9, id="lambda"),
        pytest.param("lambda x, f=train: f(x) + FACTOR", (1,), {}, 20, id="lambda-of-no-module"),
        pytest.param("partial", (), {}, 23, id="partial"),
        pytest.param("Trainer(5).train", (1,), {}, 15, id="bound-method"),
        pytest.param("Trainer.make", (8,), {}, 8, id="class-method"),
        pytest.param("Trainer(6)", (1,), {}, 16, id="callable-object"),
        pytest.param("max", ([3, 9],), {}, 9, id="builtin"),
        pytest.param("lambda f, **k: f(**k)", (dict,), {"a": [1]}, {"a": [1]}, id="arguments"),
    ],
)
def test_callables_travel_with_the_users_modules(user, expression, args, kwargs, expected):
    function = eval(expression, vars(user))
    pickled = pickling.dump_function(function, args, kwargs)
    assert pickling.load_value([call_elsewhere(user, pickled)], 0) == expected


@pytest.mark.parametrize("files", [["__init__.py"], []], ids=["package", "namespace-package"])
def test_modules_of_a_package_travel_together(files, tmp_path, monkeypatch):
    folder = tmp_path / "user_module_package"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    (folder / "model.py").write_text("def size():\n    return 3\n")
    (folder / "train.py").write_text(
        "import user_module_package.model\nfrom . import model\nfrom .model import size\n"
        "def train():\n    return size() + model.size() + user_module_package.model.size()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("user_module_package.train")
    try:
        assert pickling.load_value([call_elsewhere(module, pickling.dump_function(module.train, (), {}))], 0) == 9
    finally:
        for name in ("user_module_package", "user_module_package.model", "user_module_package.train"):
            del sys.modules[name]


def test_classes_by_value_come_back_as_the_drivers_own(user):
    config, phase, trainer = pickling.load_value(
        [call_elsewhere(user, pickling.dump_function(user.results, (), {}))], 0
    )
    assert type(config) is user.Config
    assert config == user.Config(0.5)
    assert phase is user.Phase.WARM
    assert trainer is user.Trainer


def test_values_with_slots_come_back(user):
    slotted, config, pair = pickling.load_value([call_elsewhere(user, pickling.dump_function(user.slotted, (), {}))], 0)
    assert (type(slotted), slotted.rate, slotted.hidden()) == (user.Slotted, 0.5, 0.5)
    assert config == user.SlottedConfig(0.25)
    assert (type(pair), pair._asdict()) == (user.Pair, {"rate": 0.125, "depth": 2})


def test_exceptions_of_the_users_modules_come_back_as_the_drivers_own(user):
    error = pickling.load_exception(call_elsewhere(user, pickling.dump_function(user.diverge, (), {})))
    assert type(error) is user.Diverged
    assert error.args == ("loss", float("inf"))


@pytest.mark.parametrize("fails", [False, True])
def test_cloudpickles_registry_is_left_as_it_was(user, fails):
    cloudpickle.register_pickle_by_value(user)  # the user's own registration has to stay
    try:
        try:
            pickling.dump_function(user.with_lock if fails else user.train, (), {})
        except PayloadError:
            assert fails
        assert cloudpickle.list_registry_pickle_by_value() == {user.__name__}
    finally:
        cloudpickle.unregister_pickle_by_value(user)


def closure_over(guard):
    def train():
        return guard

    return train


class Holder:
    def __init__(self):
        self.lock = threading.Lock()

    def train(self):
        pass


class HeldCall(Holder):
    __call__ = Holder.train


def train(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "words"),
    [
        pytest.param(closure_over(threading.Lock()), (), {}, ["the variable 'guard'", "_thread.lock"], id="closure"),
        pytest.param(closure_over([threading.Lock()]), (), {}, ["the variable 'guard'", "list"], id="inside-a-list"),
        pytest.param("with_lock", (), {}, ["with_lock", "the global 'LOCK'", "_thread.lock"], id="global"),
        pytest.param(train, (1, threading.Lock()), {}, ["argument 2 ", "_thread.lock"], id="argument"),
        pytest.param(train, (1,), {"guard": threading.Lock()}, ["argument 'guard'", "_thread.lock"], id="keyword"),
        pytest.param("nested", (), {}, ["nested", "the global 'LOCK'", "_thread.lock"], id="of-an-inner-function"),
        pytest.param("indirect", (), {}, ["indirect", "in with_lock, the global 'LOCK'"], id="of-another-function"),
        pytest.param("again", (), {}, ["again", "in with_lock, the global 'LOCK'"], id="in-a-circle"),
        pytest.param("sums_locked", (), {}, ["sums_locked", "in sums_locked, the global 'LOCK'"], id="decorated"),
        pytest.param(
            Holder().train,
            (),
            {},
            ["Holder.train", "the Holder object it is bound to", "because of its lock"],
            id="bound-method",
        ),
        pytest.param(train, (Holder(),), {}, ["argument 1 ", "Holder, which", "because of its lock"], id="attribute"),
        pytest.param(HeldCall(), (), {}, ["HeldCall", "its attribute 'lock'", "_thread.lock"], id="callable-object"),
        pytest.param("locked", (), {}, ["Locked", "in Locked.__call__, the global 'LOCK'"], id="call-of-an-object"),
        pytest.param(functools.partial(train), (threading.Lock(),), {}, ["train", "argument 1 "], id="of-a-partial"),
        pytest.param("with_default", (), {}, ["the default of its argument 'lock'", "_thread.lock"], id="default"),
        pytest.param(
            "with_keyword_default",
            (),
            {},
            ["the default of its argument 'lock'", "_thread.lock"],
            id="default-of-a-keyword",
        ),
        pytest.param(
            functools.partial(train, 1, threading.Lock()),
            (),
            {},
            ["argument 2 of the partial", "_thread.lock"],
            id="argument-in-a-partial",
        ),
        pytest.param(
            functools.partial(train, guard=threading.Lock()),
            (),
            {},
            ["argument 'guard' of the partial", "_thread.lock"],
            id="keyword-in-a-partial",
        ),
    ],
)
def test_what_cannot_be_pickled_is_named(user, function, args, kwargs, words):
    function = getattr(user, function) if isinstance(function, str) else function
    with pytest.raises(PayloadError) as caught:
        pickling.dump_function(function, args, kwargs)
    assert caught.value.__cause__ is not None
    for word in words:
        assert word in str(caught.value)


class Shell:
    """Stands for IPython's, which also holds a connection to its history."""

    def __init__(self):
        self.history = threading.Lock()

    def get_ipython(self):
        return self


Shell.__module__ = "ipykernel.zmqshell"


def test_what_exists_only_in_the_notebook_is_named():
    function = types.FunctionType((lambda: get_ipython()).__code__, {"get_ipython": Shell().get_ipython})  # noqa: F821
    with pytest.raises(PayloadError, match=r"global 'get_ipython' .*exists only in the notebook"):
        pickling.dump_function(function, (), {})


def accumulator():
    return pytest.importorskip("pyspark").accumulators.Accumulator(-1, 0, None)


def test_the_reason_is_that_of_the_object_that_is_named():
    def count(lock=threading.Lock(), *, seen=accumulator()):
        return lock, seen

    with pytest.raises(PayloadError, match="argument 'lock' is a _thread.lock, which") as caught:
        pickling.dump_function(count, (), {})
    assert "cannot pickle '_thread.lock' object" in str(caught.value)


def test_a_module_with_an_object_of_spark_is_named_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "user_module_counts.py").write_text("FACTOR = 10\nseen = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("user_module_counts")
    module.seen = accumulator()
    try:
        with pytest.raises(PayloadError, match=r"a module of yours, .* cannot be pickled \(seen\), since ") as caught:
            pickling.dump_function(closure_over(module), (), {})
    finally:
        del sys.modules["user_module_counts"]
    assert "the pyspark.accumulators.Accumulator in it counts in Spark's own tasks only. Return" in str(caught.value)


def test_a_process_without_spark_refuses_nothing():
    code = "from distributor.shipping.spark_objects import refused; assert not refused()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (train, "train"),
        (functools.partial(train, 1), "train"),
        (Holder().train, "Holder.train"),
        (Holder(), "Holder"),
        (Holder, "Holder"),
        (max, "max"),
        (closure_over(1), "closure_over.<locals>.train"),
    ],
)
def test_names_for_messages(function, name):
    assert pickling.name_of(function) == name


@pytest.fixture(params=["installed", "3.1.3"])
def cloudpickles(request, monkeypatch):
    """cloudpickle as it is here, and as 3.1.3 is, which gives code this name in place of its file's."""
    if request.param == "3.1.3":
        (table, *_) = cloudpickle.Pickler.dispatch_table.maps
        reduce = table[types.CodeType]
        monkeypatch.setitem(
            table, types.CodeType, lambda code: reduce(code.replace(co_filename="".join("<dynamic-code>")))
        )


def code_of(what):
    """The code of a function, of the function that it decorates, of a method, or of a class's ``__str__``."""
    if isinstance(what, BaseException):
        what = type(what).__str__
    what = inspect.unwrap(what)
    return getattr(what, "__func__", what).__code__


def seen(code):
    """What tracebacks, stacks, ``inspect`` and compilers read from code, and from the code inside."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    own = (code.co_qualname, code.co_filename, code.co_firstlineno, list(code.co_positions()))
    return [own, *(line for each in inner for line in seen(each))]


SEEN = f"""
import inspect, pickle, sys, types
{inspect.getsource(code_of)}
{inspect.getsource(seen)}
loaded = pickle.load(sys.stdin.buffer)
print(seen(code_of(loaded[0] if type(loaded) is tuple else loaded)))
"""


def seen_elsewhere(pickled):
    done = subprocess.run([sys.executable, "-c", SEEN], input=pickled, stdout=subprocess.PIPE, cwd=os.sep, check=True)
    return ast.literal_eval(done.stdout.decode())


@pytest.mark.parametrize(
    "expression", ["train", "closure(7)", "square", "Trainer(5).train", "sums", "sums.__wrapped__"]
)
def test_code_keeps_its_file_and_its_lines(user, cloudpickles, expression):
    function = eval(expression, vars(user))
    expected = seen(code_of(function))
    assert {file for _, file, *_ in expected} == {user.__file__}
    assert seen_elsewhere(pickling.dump_function(function, (), {})) == expected


def make_own_error():
    class Own(Exception):
        def __str__(self):
            return "own"

    return Own()


def test_code_that_comes_back_keeps_its_file_and_its_lines(cloudpickles):
    function, error = closure_over(1), make_own_error()
    assert seen_elsewhere(dumped(function)) == seen(code_of(function))
    assert seen_elsewhere(pickling.dump_exception(error)) == seen(code_of(error))


def test_the_users_own_pickles_stay_cloudpickles():
    before = cloudpickle.dumps(closure_over(1))
    pickling.dump_function(closure_over(1), (), {})
    assert cloudpickle.dumps(closure_over(1)) == before
    assert b"distributor" not in before


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class NeedsTwo(Exception):
    """Pickles, and fails to unpickle: ``args`` are not what ``__init__`` takes."""

    def __init__(self, where, why):
        super().__init__(f"{where}: {why}")


def with_attribute(value):
    error = ValueError("bad")
    error.detail = value
    return error


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), KeyError("lr"), OSError(2, "No such file"), SystemExit(3), with_attribute([1, 2]), Frozen(3)],
)
def test_exceptions_survive(error):
    copy = pickling.load_exception(pickling.dump_exception(error))
    assert type(copy) is type(error)
    assert (copy.args, vars(copy)) == (error.args, vars(error))


class HoldsLock(Exception):
    def __init__(self, why):
        super().__init__(why)
        self.why, self.lock = why, threading.Lock()


class Unmakable(HoldsLock):
    def __str__(self):
        return f"lock {self.lock}"


@pytest.mark.parametrize(
    ("error", "kind", "args", "attributes"),
    [
        (NeedsTwo("here", "so"), NeedsTwo, ("here: so",), {}),
        (with_attribute(threading.Lock()), ValueError, ("bad",), {}),
        (HoldsLock("busy"), HoldsLock, ("busy",), {"why": "busy"}),
    ],
)
def test_exceptions_lose_what_cannot_travel(error, kind, args, attributes):
    copy = pickling.load_exception(pickling.dump_exception(error))
    assert (type(copy), copy.args, vars(copy)) == (kind, args, attributes)


def test_an_exception_that_cannot_be_remade_becomes_its_nearest_base():
    error = Unmakable("busy")
    copy = pickling.load_exception(pickling.dump_exception(error))
    assert (type(copy), copy.args) == (HoldsLock, (str(error),))


def test_groups_keep_members_and_exceptions_their_chain():
    inner = HoldsLock("inner")
    inner.__cause__ = KeyError("lr")
    outer = ExceptionGroup("all", [inner, NeedsTwo("here", "so")])
    outer.__cause__ = ValueError("first")
    outer.__cause__.__context__ = outer  # a circle
    copy = pickling.load_exception(pickling.dump_exception(outer))
    assert [(type(each), each.args) for each in copy.exceptions] == [(HoldsLock, ("inner",)), (NeedsTwo, ("here: so",))]
    assert copy.exceptions[0].__cause__.args == ("lr",)
    assert copy.exceptions[0].__suppress_context__
    assert (type(copy.__cause__), copy.__cause__.args, copy.__suppress_context__) == (ValueError, ("first",), True)


def test_an_exception_whose_class_refuses_changes_keeps_its_cause():
    error = Frozen(3)
    BaseException.__setattr__(error, "__cause__", KeyError("lr"))
    copy = pickling.load_exception(pickling.dump_exception(error))
    assert (type(copy), copy.code, copy.__cause__.args) == (Frozen, 3, ("lr",))


def test_of_a_long_chain_the_first_exceptions_travel():
    error = ValueError(0)
    for number in range(1, 2000):
        error, error.__context__ = ValueError(number), error
    copy = pickling.load_exception(pickling.dump_exception(error))
    assert (copy.args, copy.__context__.args) == ((1999,), (1998,))


@pytest.mark.parametrize("pickled", [None, b"", b"no pickle", pickle.dumps("text"), b"cno_such_module\nno_such\n."])
def test_exceptions_that_cannot_be_loaded(pickled):
    assert pickling.load_exception(pickled) is None


def dumped(value):
    file = io.BytesIO()
    pickling.dump_value(value, file)
    return file.getvalue()


@given(
    st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=10),
    st.lists(st.integers(0, 300), max_size=20),
    st.sampled_from([bytes, memoryview]),
)
def test_values_come_in_pieces_of_any_size(value, cuts, kind):
    data = dumped(value)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [kind(data[start:end]) for start, end in itertools.pairwise(edges)]
    assert pickling.load_value(pieces, 0) == value


@pytest.mark.parametrize("size", [1, 7, 4096, (1 << 20) - 1, (1 << 20) + 1])
def test_large_values_come_in_pieces(size):
    # Larger than the buffer that pieces are read through; few pieces of one byte are enough.
    value = os.urandom(3 << 20 if size > 7 else 1 << 10)
    data = dumped({"weights": value, "again": [value, value]})
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    loaded = pickling.load_value(pieces, 0)
    assert loaded == {"weights": value, "again": [value, value]}
    assert loaded["again"][0] is loaded["weights"]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([], id="nothing"),
        pytest.param([b"no pickle"], id="no-pickle"),
        pytest.param([dumped("text")[:-3]], id="cut"),
        pytest.param([b"cno_such_module\nno_such\n."], id="no-such-module"),
        pytest.param([pickle.dumps(NeedsTwo("here", "so"))], id="fails-to-load"),
    ],
)
def test_values_that_cannot_be_loaded(pieces):
    with pytest.raises(ResultError, match=r"rank 3 cannot be unpickled on the driver: \w+") as caught:
        pickling.load_value(pieces, 3)
    assert caught.value.__cause__ is not None


class Tensor:
    """Stands for ``torch.Tensor``."""

    def __init__(self, device):
        self.device = types.SimpleNamespace(type=device)

    def cpu(self):
        return Tensor("cpu")


@pytest.mark.parametrize(("device", "expected"), [("cuda", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_tensors_leave_their_accelerator(monkeypatch, device, expected):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, TypedStorage=None))
    loaded = pickling.load_value([dumped({"state": [Tensor(device)]})], 0)
    assert loaded["state"][0].device.type == expected


def tensors():
    import torch

    numbers = torch.arange(60_000).reshape(200, 300)
    return {
        "plain": numbers.float(),
        "view": numbers.double()[3:7, ::2],
        "transposed": numbers.to(torch.complex64).T,
        "half": numbers.bfloat16(),
        "bool": numbers > 7,
        "parameter": torch.nn.Parameter(numbers.float()),
        "small": numbers[:2].clone(),
        "empty": numbers[:0].clone(),
        "sparse": numbers.float().to_sparse(),
    }


@pytest.mark.parametrize(
    "name", ["plain", "view", "transposed", "half", "bool", "parameter", "small", "empty", "sparse"]
)
def test_tensors_come_back_as_they_were(name):
    tensor = tensors()[name]
    loaded = pickling.load_value([dumped([tensor])], 0)[0]
    assert (type(loaded), loaded.dtype, loaded.layout) == (type(tensor), tensor.dtype, tensor.layout)
    assert loaded.requires_grad == tensor.requires_grad
    assert (loaded.to_dense() if name == "sparse" else loaded).equal(tensor.to_dense() if name == "sparse" else tensor)
    if name != "sparse":
        assert (loaded.stride(), loaded.storage_offset()) == (tensor.stride(), tensor.storage_offset())


def test_the_memory_of_a_tensor_is_written_as_it_is():
    import torch

    class File(io.BytesIO):
        largest = 0

        def write(self, data):
            self.largest = max(self.largest, memoryview(data).nbytes)
            return super().write(data)

    file = File()
    tensor = torch.rand(1 << 20)
    pickling.dump_value({"weights": tensor}, file)
    assert file.largest == tensor.nbytes
    assert tensor.nbytes < len(file.getvalue()) < tensor.nbytes + 500


def test_tensors_that_came_back_can_be_changed_and_saved():
    import torch

    loaded = pickling.load_value([dumped(torch.zeros(1 << 20))], 0)
    loaded += 1
    loaded.share_memory_()
    file = io.BytesIO()
    torch.save({"weights": loaded}, file)
    file.seek(0)
    assert torch.load(file)["weights"].sum() == 1 << 20


def test_a_value_that_cannot_be_pickled():
    with pytest.raises(TypeError):
        dumped(threading.Lock())


class Hostile:
    """Something that does strange things where it is unpickled."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code, {"Unspeakable": Unspeakable})


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


ENDLESS = "while True: __import__('time').sleep(0.001)"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise Unspeakable", "Unspeakable"),
        (ENDLESS, "no progress for 0.2 s"),
    ],
)
def test_values_that_do_strange_things_as_they_are_loaded(monkeypatch, code, text):
    monkeypatch.setattr(pickling, "_VALUE_PATIENCE", 0.2)
    with pytest.raises(ResultError) as caught:
        pickling.load_value([pickle.dumps(Hostile(code))], 3)
    assert str(caught.value).startswith(f"the return value of rank 3 cannot be unpickled on the driver: {text}. Return")


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "raise KeyboardInterrupt", ENDLESS])
def test_exceptions_that_do_strange_things_as_they_are_loaded(monkeypatch, code):
    monkeypatch.setattr(pickling, "_EXCEPTION_PATIENCE", 0.2)
    assert pickling.load_exception(pickle.dumps(Hostile(code))) is None


class Leaver:
    """Something that tries to exit as it is pickled."""

    def __reduce__(self):
        raise SystemExit(3)


def test_arguments_that_try_to_exit_as_they_are_pickled():
    with pytest.raises(PayloadError, match=r"argument 1 is a .*Leaver, which cannot be pickled \(SystemExit: 3\)"):
        pickling.dump_function(print, (Leaver(),), {})


TORCH_CODE = """
import torch
from torch.backends import cudnn

def train():
    torch.backends.cudnn.benchmark = cudnn.deterministic = True
    return torch.backends.cudnn.benchmark, cudnn is torch.backends.cudnn
"""


@pytest.mark.slow
def test_modules_with_a_class_of_their_own_travel_by_name(tmp_path, monkeypatch):
    """As torch's backends, whose settings code changes before it trains."""
    name = next(names)
    (tmp_path / f"{name}.py").write_text(TORCH_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    value = call_elsewhere(module, pickling.dump_function(module.train, (), {}))
    del sys.modules[name]
    assert pickle.loads(value) == (True, True)


class Array:
    """As numpy's arrays, one that pickle leaves out of the pickle."""

    def __init__(self, memory):
        self.memory = memory

    def __reduce_ex__(self, protocol):
        return Array, (pickle.PickleBuffer(self.memory),)


def loaded_from(pickled, path):
    path.write_bytes(pickled if isinstance(pickled, bytes) else (pickled.seek(0), pickled.read())[1])
    return pickling.load_function(path)


@pytest.mark.parametrize("size", [0, 100, 3 << 20])
def test_arrays_are_mapped_from_the_calls_file(size, tmp_path):
    content, text = random.Random(0).randbytes(size), "t" * size
    pickled = pickling.dump_function(print, (Array(bytearray(content)), [text], Array(content)), {"end": text})
    assert isinstance(pickled, bytes) == (size < 1 << 20)
    (_, (array, texts, fixed), named), again = (loaded_from(pickled, tmp_path / str(n)) for n in range(2))
    assert (bytes(array.memory), texts, named, bytes(fixed.memory)) == (content, [text], {"end": text}, content)
    assert memoryview(fixed.memory).readonly
    array.memory[:] = bytes(size)
    assert bytes(again[1][0].memory) == content
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_a_call_takes_its_memory_once(tmp_path):
    import torch

    weights = torch.ones(4 << 20)
    tracemalloc.start()
    try:
        pickling.dump_function(print, (Array(bytearray(8 << 20)), b"t" * (8 << 20), weights), {})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20 << 20  # the arguments themselves, and little more


def test_a_call_that_the_temporary_folder_cannot_hold(monkeypatch):
    monkeypatch.setattr(pickling.tempfile, "TemporaryFile", lambda: open("/dev/full", "wb"))
    with pytest.raises(PayloadError, match=r"the temporary folder .* takes \(No space left on device\). Load large"):
        pickling.dump_function(print, (bytes(2 << 20),), {})


def test_the_largest_part_of_a_call_is_found():
    held = bytes(3000)
    label, size = pickling.largest_part(lambda a: held, (bytes(10),), {})
    assert label == "the variable 'held' that it uses"
    assert 3000 < size < 3030
    label, size = pickling.largest_part(closure_over(1), (1, Array(bytearray(5000))), {"x": threading.Lock()})
    assert label == "argument 2"
    assert size > 5000
