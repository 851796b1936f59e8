"""Who imports whom, and what an import costs."""

import ast
import functools
import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distributor

ROOT = Path(distributor.__file__).parent
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


PROBE = """
import json, sys
before = set(sys.modules)
{}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded_by(statement):
    """Names of the modules that a fresh Python has after a statement, beyond those it has anyway."""
    command = [sys.executable, "-c", PROBE.format(statement)]
    return set(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import distributor", {"torch", "pyspark", "deepspeed", "pandas", "cloudpickle", "asyncio"}),
        ("from distributor import TorchDistributor", {"torch", "pyspark", "pandas", "rich", "IPython"}),
        ("import distributor.cli.command", {"torch", "pyspark", "pandas", "IPython"}),
        ("import distributor.node.agent", {"torch", "pyspark", "pandas", "cryptography"}),
        ("import distributor.rank.process", {"torch", "pyspark", "pandas"}),
        ("import distributor.schedulers.local", {"torch", "pyspark", "pandas"}),
        ("import distributor.schedulers.spark.scheduler", {"torch", "pandas", "pyspark.sql"}),
        ("import distributor.schedulers.spark.scheduler, pyspark.sql, pyspark.worker", {"pandas", "torch"}),
        (
            "from distributor import DeepspeedTorchDistributor, zero, suggest_zero",
            {"torch", "deepspeed", "yaml", "hjson"},
        ),
        ("from distributor import autotune, runtime, deepspeed_checkpoint", {"torch", "deepspeed", "pyspark"}),
        ("from distributor import Checkpoints; import distributor.checkpoint.folder", {"torch", "pyspark", "fsspec"}),
        (
            "import distributor.schedulers.hosting.host_node, distributor.channel.requests",
            {"asyncio", "torch", "pyspark"},
        ),
        ("import distributor.schedulers.spark.task", {"torch", "pyspark", "cloudpickle"}),
        (
            "from distributor.compat.databricks import air, serverless_gpu",
            {"torch", "pyspark", "ray", "cryptography", "rich"},
        ),
        ("from distributor.compat import azureml", {"torch", "pyspark", "ray", "tensorflow"}),
    ],
)
def test_an_import_loads_only_what_it_needs(statement, absent):
    assert not absent & loaded_by(statement)


def test_launch_paths_load_on_first_use():
    assert not {name for name in loaded_by("import distributor") if name.startswith("distributor.launch")}
    loaded = {name for name in loaded_by("import distributor.launch") if name.startswith("distributor.launch")}
    assert loaded == {"distributor.launch", "distributor.launch.registry"}
    assert "distributor.launch.ray.path" in loaded_by("from distributor.launch import Ray")


def test_names_of_the_package_load_on_first_use():
    assert "distributor.errors" not in loaded_by("import distributor")
    assert "distributor.errors" in loaded_by("import distributor; distributor.TrainingError")
    for name in distributor.__all__:
        assert getattr(distributor, name) is not None
        assert name in dir(distributor)
    assert {name for name in dir(distributor) if name[:2] != "__"} == set(distributor.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        distributor.no_such_name


def test_help_begins_with_the_public_names():
    first_screen, modules, _ = pydoc.render_doc(distributor, renderer=pydoc.plaintext).partition("PACKAGE CONTENTS")
    assert modules
    assert all(re.search(rf"\b{name}\b", first_screen) for name in distributor.__all__ if name != "__version__")
    assert len(first_screen.splitlines()) <= 40
    assert max(map(len, first_screen.splitlines())) <= 80


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(source):
    """Modules that a source imports at run time, at once or later; ``from a import b`` is ``a`` and ``a.b``."""
    found, nodes = set(), [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        nodes += node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
    return found


@functools.cache
def imports():
    return {name: imports_of(source) for name, source in FILES.items()}


def importers_of(package):
    return {
        name
        for name, modules in imports().items()
        if any(module == package or module.startswith(package + ".") for module in modules)
    }


def test_the_imports_of_a_source():
    source = """
import a.b as c
from d import e
if TYPE_CHECKING:
    import f
else:
    import g
def later():
    from h.i import j
"""
    assert imports_of(source) == {"a.b", "d", "d.e", "g", "h.i", "h.i.j"}


#: What a room may import beside ``values``, ``text`` and ``errors``.
ROOMS = {
    "machine": set(),
    "channel": {"machine"},
    "shipping": set(),
    "launch": {"machine"},
    "rank": {"shipping", "machine", "channel", "metrics", "stopping"},
    "node": {"rank", "launch", "channel", "shipping", "machine", "stopping"},
    "outcomes": {"shipping"},
    "display": {"outcomes"},
    "schedulers": {"outcomes", "channel", "shipping", "launch", "machine"},
    "stopping": {"machine", "outcomes"},
    "metrics": {"machine"},
    "output": {"channel", "machine", "shipping"},
    "run": {"schedulers.base", "display", "outcomes", "channel", "machine", "metrics", "output", "stopping"},
    "checkpoint": {"rank.group", "metrics.rank", "machine", "channel"},
    "data": {"checkpoint.catalog", "metrics.rank", "schedulers", "shipping", "machine"},
    "scoring": {"data", "checkpoint", "outcomes.stacks", "schedulers", "shipping", "machine"},
    "tracking": {"checkpoint", "run", "metrics", "machine"},
    "api": {"run", "schedulers", "display", "data", "tracking", "launch", "shipping", "machine"},
    "search": {"api", "display", "run", "tracking", "metrics", "outcomes", "machine"},
}
BELOW = {"text": set(), "values": {"errors", "text"}, "errors": {"text"}}
#: What programs of launch paths, and the classes that read their configurations, import besides.
PROGRAMS = {
    "launch/accelerate/configuration.py": {"shipping"},
    "launch/accelerate/path.py": {"shipping"},
    "launch/mpi/connector.py": {"channel.control"},
    "launch/ray/node.py": {"rank.gpus"},
}
#: Nothing in a room imports these, and they may import anything.
ABOVE = ("cli", "compat", "__init__", "__main__", "callbacks", "runtime")


def names_within(name):
    """What a file imports of the package, as ``room.module``."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in FILES}
    own = {module.removeprefix("distributor.") for module in imports()[name] if module.startswith("distributor.")}
    return own & modules


def room_of(name):
    return name.removesuffix(".py").partition("/")[0].partition(".")[0]


@pytest.mark.parametrize("name", sorted(FILES))
def test_arrows_between_rooms_go_down(name):
    room = room_of(name)
    if room in ABOVE:
        return
    allowed = BELOW[room] if room in BELOW else ROOMS[room] | set(BELOW) | PROGRAMS.get(name, set())
    for module in names_within(name):
        rooms = {room, *allowed}
        assert room_of(module) in rooms or module in rooms or any(each.startswith(f"{module}.") for each in rooms), (
            module
        )
    assert not any(module.startswith(".") for module in imports()[name])
    assert "from distributor import" not in re.sub(r"(?m)^    .*", "", FILES[name])


def test_every_folder_is_a_room():
    assert {room_of(name) for name in FILES} == {*ROOMS, *BELOW, *ABOVE}


@pytest.mark.parametrize("room", [*ROOMS, "text", "values"])
def test_a_room_says_where_it_runs(room):
    source = ast.parse(FILES[f"{room}/__init__.py"])
    assert room == "launch" or [type(node) for node in source.body] == [ast.Expr]
    assert re.search(r"\b[Rr]uns? ", ast.get_docstring(source))


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        (
            "torch",
            {
                "node/launcher.py",
                "node/rendezvous.py",
                "rank/dataloaders.py",
                "rank/gpus.py",
                "rank/group.py",
                "rank/lookups.py",
                *(
                    f"checkpoint/{name}.py"
                    for name in (
                        "exchange",
                        "loading",
                        "pickles",
                        "pinned",
                        "plans",
                        "saving",
                        "shards",
                        "training_state",
                    )
                ),
                "checkpoint/memory/memory.py",
                *("data/loader.py", "data/reader.py", "scoring/model.py", "scoring/model_process.py"),
                "shipping/pickling.py",
                "compat/accelerators.py",
                "compat/databricks/serverless_gpu/runtime.py",
                "launch/deepspeed/checkpoint.py",
                "launch/deepspeed/extensions.py",
                "runtime.py",
                "tracking/tensorboard.py",
                "tracking/mlflow_model.py",
            },
        ),
        ("accelerate", {"launch/accelerate/variables.py"}),
        ("deepspeed", {"launch/deepspeed/checkpoint.py", "launch/deepspeed/extensions.py"}),
        ("cloudpickle", {"shipping/pickling.py", "shipping/fingerprint.py", "shipping/package.py"}),
        ("cryptography", {"channel/tls.py"}),
        (
            "pyspark",
            {
                "data/spark_frames.py",
                *("scoring/predict.py", "scoring/partition.py"),
                *(name for name in FILES if name.startswith("schedulers/")),
            },
        ),
        (
            "pyarrow",
            {
                "metrics/table.py",
                *(f"data/{name}.py" for name in ("arrays", "local_tables", "spark_frames", "writer")),
                "scoring/partition.py",
                *(name for name in FILES if name.startswith("schedulers/")),
            },
        ),
        ("pandas", {"metrics/table.py"}),
        ("matplotlib", {"metrics/plot.py", "metrics/table.py", "run/handle.py", "search/study.py"}),
        (
            "mlflow",
            {
                "metrics/autologging.py",
                "tracking/mlflow.py",
                "tracking/mlflow_files.py",
                "tracking/mlflow_model.py",
                "tracking/mlflow_sender.py",
            },
        ),
        ("optuna", {f"search/{name}.py" for name in ("kept", "space", "study", "sweep")}),
        ("fsspec", {"machine/storage.py"}),
        ("rich", {"display/terminal.py"}),
        ("rich_click", {f"cli/{name}.py" for name in ("command", "flags", "launch_flags", "sweep_options")}),
        ("IPython", {"display/notebook.py"}),
        ("distributor.cli", {"__main__.py", "cli/command.py", "cli/launch_flags.py", "cli/sweep_options.py"}),
    ],
)
def test_who_may_import(package, allowed):
    assert importers_of(package) <= allowed


def test_no_other_package_is_needed():
    known = {"torch", "cloudpickle", "cryptography", "pyspark", "pyarrow", "distributor"}
    known |= {"deepspeed", "hjson", "yaml"}  # on the DeepSpeed path only, and never at import
    known |= {"accelerate"}  # on the Accelerate path only, in a process of its own
    known |= {"pandas", "matplotlib"}  # for a user who asks for them by name
    known |= {"mlflow"}  # for its callback, on the driver, and in ranks where users log to it
    known |= {"optuna"}  # for sweep, on the driver
    known |= {"fsspec"}  # for an output_dir or checkpoints behind a URL
    known |= {"numpy"}  # for its random state, if a checkpoint has one
    known |= {"click", "rich", "rich_click", "IPython"}  # on the driver, for what it shows
    used = {module.partition(".")[0] for modules in imports().values() for module in modules}
    assert used <= known | sys.stdlib_module_names
