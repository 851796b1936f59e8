"""Who imports whom, and what an import costs."""

import ast
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
        ("import distributor.cli", {"torch", "pyspark", "pandas", "IPython"}),
        ("import distributor.agent", {"torch", "pyspark", "pandas", "cryptography"}),
        ("import distributor.rank", {"torch", "pyspark", "pandas"}),
        ("import distributor.schedulers.local", {"torch", "pyspark", "pandas"}),
        ("import distributor.schedulers.spark", {"torch", "pandas", "pyspark.sql"}),
        ("import distributor.schedulers.spark, pyspark.sql, pyspark.worker", {"pandas", "torch"}),
        (
            "from distributor import DeepspeedTorchDistributor, zero, suggest_zero",
            {"torch", "deepspeed", "yaml", "hjson"},
        ),
        ("from distributor import autotune, runtime, deepspeed_checkpoint", {"torch", "deepspeed", "pyspark"}),
        ("import distributor.start, distributor.exchange", {"asyncio", "torch", "pyspark"}),
        ("import distributor.schedulers.spark_task", {"torch", "pyspark", "cloudpickle"}),
    ],
)
def test_an_import_loads_only_what_it_needs(statement, absent):
    assert not absent & loaded_by(statement)


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


IMPORTS = {name: imports_of(source) for name, source in FILES.items()}


def importers_of(package):
    return {
        name
        for name, modules in IMPORTS.items()
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


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("torch", {"launcher.py", "lookups.py", "payload.py", "deepspeed_checkpoint.py", "extensions.py"}),
        ("deepspeed", {"deepspeed_checkpoint.py", "extensions.py"}),
        ("cloudpickle", {"payload.py", "shipping.py"}),
        ("cryptography", {"channel/server.py"}),
        ("pyspark", {name for name in FILES if name.startswith("schedulers/")}),
        ("pyarrow", {name for name in FILES if name.startswith("schedulers/")}),
        ("rich", {"views/terminal.py"}),
        ("rich_click", {"cli.py"}),
        ("IPython", {"views/notebook.py"}),
        ("distributor.schedulers", {"api.py", "cli.py", *(name for name in FILES if name.startswith("schedulers/"))}),
        ("distributor.api", {"autotuning.py", "cli.py"}),
        # What stands beside the core: the core imports none of it.
        ("distributor.autotuning", set()),
        ("distributor.cli", {"__main__.py"}),
        ("distributor.dry_run", {"cli.py"}),
        ("distributor.deepspeed_checkpoint", set()),
        ("distributor.runtime", set()),
        ("distributor.zero_stages", set()),
    ],
)
def test_who_may_import(package, allowed):
    assert importers_of(package) <= allowed


def test_no_other_package_is_needed():
    known = {"torch", "cloudpickle", "cryptography", "pyspark", "pyarrow", "distributor"}
    known |= {"deepspeed", "hjson", "yaml"}  # on the DeepSpeed path only, and never at import
    known |= {"click", "rich", "rich_click", "IPython"}  # on the driver, for what it shows
    used = {module.partition(".")[0] for modules in IMPORTS.values() for module in modules}
    assert used <= known | sys.stdlib_module_names


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("errors.py", {"cells", "wording"}),
        ("cells.py", set()),
        ("modules.py", set()),
        ("wording.py", set()),
        ("nodes.py", {"job", "wording"}),
        ("stacks.py", {"wording"}),
        ("timings.py", {"outcomes"}),
        ("advice.py", {"job", "modules"}),
        ("job.py", set()),
        ("allocator.py", set()),
        ("lookups.py", set()),
        ("processes.py", set()),
        ("network.py", set()),
        ("control.py", set()),
        ("folders.py", set()),
        ("environment.py", {"processes"}),
        ("exchange.py", {"network"}),
        ("start.py", {"allocator", "control", "environment", "folders", "processes"}),
        ("channel/frames.py", set()),
        ("channel/node.py", {"channel.frames", "network"}),
        ("devices.py", {"errors"}),
        ("limits.py", {"wording"}),
        ("tables.py", set()),
        ("deepspeed_config.py", {"errors"}),
        ("zero_stages.py", {"deepspeed_config", "errors", "limits", "tables"}),
        ("extensions.py", {"errors", "folders"}),
        ("deepspeed_checkpoint.py", {"errors"}),
        ("launch/torchrun.py", {"devices", "environment", "job", "processes"}),
        ("launch/deepspeed.py", {"job", "launch.torchrun"}),
        ("versions.py", set()),
        ("java.py", set()),
        ("placement.py", {"devices", "errors", "job"}),
        (
            "views/__init__.py",
            {"cells", "console", "views.snapshot", "views.notebook", "views.plain", "views.terminal"},
        ),
        ("views/snapshot.py", {"job", "wording"}),
        ("views/plain.py", {"job", "views", "views.snapshot", "wording"}),
        ("views/terminal.py", {"job", "views", "views.snapshot", "wording"}),
        ("views/notebook.py", {"cells", "errors", "job", "timings", "views", "views.snapshot", "wording"}),
        ("dry_run.py", {"devices", "environment", "job", "launch", "shipping", "wording"}),
        # It runs in Spark's workers, which lack the package: what it uses is pickled with it.
        (
            "schedulers/spark_task.py",
            {"control", "devices", "exchange", "folders", "network", "processes", "start", "versions"},
        ),
    ],
)
def test_what_a_module_may_use_of_the_package(name, allowed):
    modules = {path.removesuffix(".py").replace("/", ".") for path in FILES}
    own = {module.removeprefix("distributor.") for module in IMPORTS[name] if module.startswith("distributor.")}
    assert own & modules <= allowed
    assert not any(module.startswith(".") for module in IMPORTS[name])
