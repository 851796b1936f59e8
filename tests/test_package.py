"""The package as it is published: what is in it, and that it works where nothing but its dependencies is installed."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import distributor

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent

#: What lies in a folder where somebody works, and is no part of the package.
NOT_OURS = (".git/config", ".venv/lib/module.py", "site/index.html", "build/lib/distributor/old.py", "tests/data.bin")

#: What only extras bring.
EXTRAS = ("deepspeed", "mkdocs", "pandas", "psutil", "pyarrow", "pyspark", "pytest", "sklearn", "transformers")

SMOKE = """
import importlib.util
import os
import sys
from importlib import metadata

import distributor
from distributor import TorchDistributor

assert os.path.realpath(distributor.__file__).startswith(os.path.realpath(sys.prefix)), distributor.__file__
assert [name for name in sys.argv[2:] if importlib.util.find_spec(name) is not None] == []
assert distributor.__version__ == metadata.version("distributor") == sys.argv[1]


def total():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


print(TorchDistributor(num_processes=2, use_gpu=False).submit(total).results())
"""


def check(command: list[str | Path], cwd: Path) -> str:
    """What a command prints; it has to succeed, without anything that the environment says of Python."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel, which ``build`` makes of the sdist unless it is told otherwise."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
        elif path.name in ("benchmarks", "distributor", "docs", "examples", "tests"):
            shutil.copytree(path, source / path.name, ignore=ignored)
    for name in NOT_OURS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("no part of it")
    check([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source], folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def sdist(built: Path) -> set[str]:
    """Names of its files."""
    (path,) = built.glob("*.tar.gz")
    assert path.name == f"distributor-{distributor.__version__}.tar.gz"
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    assert path.name == f"distributor-{distributor.__version__}-py3-none-any.whl"
    return path


def test_the_sdist_holds_what_it_should(sdist: set[str]) -> None:
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.cfg", "distributor/py.typed"} <= sdist
    assert set(modules()) <= sdist
    tops = {name.partition("/")[0] for name in sdist if "/" in name}
    assert tops == {"distributor", "distributor.egg-info"}


def test_the_wheel_holds_the_package_only(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"distributor-{distributor.__version__}.dist-info"
    assert {*modules(), "distributor/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert {name.partition("/")[0] for name in names} == {"distributor", info}
    assert "distributor/old.py" not in names


def modules() -> list[str]:
    """The package's files, as sources have them."""
    files = [path for path in (ROOT / "distributor").rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts]


def test_there_is_one_place_for_the_version() -> None:
    files = [
        path.name
        for path in (ROOT / "setup.cfg", ROOT / "pyproject.toml", *(ROOT / "distributor").rglob("*.py"))
        if re.search(rf"version.*=.*{re.escape(distributor.__version__)}\b", path.read_text())
    ]
    assert files == ["__init__.py"]
    assert f"## {distributor.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_connect_brings_a_pandas_that_pyspark_supports() -> None:
    """PySpark 4.3 warns of pandas 3."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = map(Requirement, setup["options.extras_require"]["connect"].strip().splitlines())
    (pandas,) = [requirement.specifier for requirement in needed if requirement.name == "pandas"]
    assert pandas.contains("2.3.3") and not pandas.contains("3.0.0")


@pytest.mark.long
def test_the_wheel_works_where_nothing_but_its_dependencies_is(wheel: Path, tmp_path: Path) -> None:
    """pip finds each dependency in the new environment, or it would fail: it can look nowhere else."""
    check([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in sorted(needed(wheel)):
        share(name, packages)
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    check([*pip, "install", "--no-index", wheel], tmp_path)
    assert check([*pip, "check"], tmp_path).strip() == "No broken requirements found."
    assert distributor.__version__ in check([python.parent / "distributor", "--version"], tmp_path)
    (tmp_path / "smoke.py").write_text(SMOKE)
    output = check([python, "smoke.py", distributor.__version__, *EXTRAS], tmp_path)
    assert output.splitlines()[-1] == "[3.0, 3.0]"


def needed(wheel: Path) -> set[str]:
    """What a wheel needs without extras, and all that needs in turn, among what is installed here."""
    (path,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    head = zipfile.ZipFile(wheel).read(path).decode().partition("\n\n")[0]
    names: set[str] = set()
    left = [Requirement(text) for text in re.findall(r"^Requires-Dist: (.*)$", head, re.MULTILINE)]
    while left:
        requirement = left.pop()
        extras = requirement.extras or {""}
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in names:
            names.add(name)
            left += requirements_of(name, extras)
    return names


def requirements_of(name: str, extras: set[str]) -> Iterator[Requirement]:
    for text in metadata.distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            requirement.marker = None
            yield requirement


def share(name: str, packages: Path) -> None:
    """Has another environment see an installed distribution, and none that is beside it."""
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
