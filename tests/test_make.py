"""Environments that make makes: what is refused and how, what is installed, which versions are pinned."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import environment
import preflight
import pytest
import pythons
import unset
from packaging.requirements import Requirement

from distributor.values.environment import CONTRACT

ROOT = Path(__file__).parent.parent

#: Which the pins are for: Debian's, and the first of each line that they have to fit.
PYTHONS = ("3.11.2", "3.11.7", "3.12.1", "3.13.0")

OLD = "import sys; sys.version_info = (3, 10, 13, 'final', 0)"
MACOS = "import platform; platform.system = lambda: 'Darwin'"


@pytest.mark.parametrize(
    ("version", "system", "missing", "says"),
    [
        ((3, 11, 2), "Linux", [], None),
        ((3, 13, 9), "Linux", [], None),
        ((3, 10, 13), "Linux", [], "Python 3.10.13 (/py) is too old: distributor needs 3.11 or later"),
        ((2, 7, 18), "Linux", [], "Python 2.7.18 (/py) is too old: "),
        ((3, 14, 0), "Linux", [], "Python 3.14.0 (/py) is too new: the pinned versions were tried on 3.11 to 3.13. "),
        ((3, 11, 2), "Darwin", [], "distributor needs Linux, but this is macOS: use a Linux machine or a container"),
        ((3, 11, 2), "Windows", [], "distributor needs Linux, but this is Windows: use a Linux machine or a cont"),
        ((3, 11, 2), "Linux", ["ensurepip"], "Python 3.11.2 (/py) cannot make virtual environments, it lacks ensure"),
    ],
)
def test_refuses_an_unfit_python_with_the_reason(
    version: Sequence[int], system: str, missing: Sequence[str], says: str | None
) -> None:
    problem = preflight.problem(version, system, missing, "/py")
    assert (problem is None) == (says is None)
    assert problem is None or problem.startswith(says or "")
    if problem is not None and system == "Linux":
        assert problem.endswith("name another one, such as: make demo PYTHON=python3.13")


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("sitecustomize", OLD, r"Python 3\.10\.13 \(.*\) is too old"),
        ("sitecustomize", MACOS, "distributor needs Linux, but this is macOS"),
        ("ensurepip", "raise ImportError", "cannot make virtual environments, it lacks ensurepip: install them"),
    ],
)
def test_make_prints_the_refusal_and_makes_nothing(module: str, source: str, says: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    venv = tmp_path / "venv"
    ended = make(ROOT, "demo", f"VENVS={venv}", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert re.search(says, ended.stderr.splitlines()[0])
    assert "Traceback" not in ended.stderr
    assert not venv.exists()


def test_old_pythons_can_read_the_check() -> None:
    ast.parse((ROOT / "tools" / "preflight.py").read_text(), feature_version=(3, 6))


def test_one_range_of_pythons_everywhere() -> None:
    oldest, newest = preflight.OLDEST[1], preflight.UNTRIED[1] - 1
    known = configparser.ConfigParser()
    known.read(ROOT / "setup.cfg")
    assert known["options"]["python_requires"] == f">=3.{oldest}"
    classifiers = re.findall(r"Python :: 3\.(\d+)", known["metadata"]["classifiers"])
    assert classifiers == [str(minor) for minor in range(oldest, newest + 1)]
    assert {version.rpartition(".")[0] for version in PYTHONS} == {f"3.{minor}" for minor in classifiers}
    settings = (ROOT / "pyproject.toml").read_text()
    assert f'target-version = "py3{oldest}"' in settings
    assert f'python_version = "3.{oldest}"' in settings


@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_has_one_version_for_each_python(python: str) -> None:
    lines = [line for line in (ROOT / "constraints" / "main.txt").read_text().splitlines() if not line.startswith("#")]
    values = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    pins = [Requirement(line) for line in lines]
    here = [pin.name.lower() for pin in pins if pin.marker is None or pin.marker.evaluate(values)]
    assert sorted(here) == sorted({pin.name.lower() for pin in pins})
    assert all(re.fullmatch(r"==[\d.]+", str(pin.specifier)) for pin in pins)


def test_the_size_is_printed_before_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    assert environment.announcement("lint", tmp_path, "3.12.1").endswith("installs what lint needs, 0.1 GB")
    both = r"with torch for CPUs, [\d.]+ GB with torch for CUDA, .* \(for CPUs: TORCH_INDEX=URL, see https://.*\)$"
    assert re.search(both, environment.announcement("demo", tmp_path, "3.12.1"))
    (tmp_path / "lib" / "python3.12" / "site-packages" / "torch").mkdir(parents=True)
    assert "CUDA" not in environment.announcement("demo", tmp_path, "3.12.1")
    monkeypatch.setenv("TORCH_INDEX", "https://host/cpu")
    assert "CUDA" not in environment.announcement("demo", tmp_path / "another", "3.12.1")


#: As in the shell of somebody who has Spark.
SHELL = {
    "PYSPARK_PYTHON": "/usr/bin/python3",
    "PYSPARK_DRIVER_PYTHON": "jupyter",
    "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
    "SPARK_HOME": "/opt/gone",
    "SPARK_REMOTE": "sc://gone",
    "HADOOP_CONF_DIR": "/opt/gone",
    "YARN_CONF_DIR": "/opt/gone",
    "OMP_NUM_THREADS": "1",
    **dict.fromkeys(CONTRACT, "1"),
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "no_proxy", "grpc_proxy"), "http://127.0.0.1:1"),
}
KEPT = ("PATH", "HOME", "TMPDIR", "JAVA_HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "PIP_CERT", "TORCH_INDEX")


def test_commands_run_as_if_nothing_of_spark_were_set() -> None:
    assert unset.foreign([*SHELL, "PYTHONPATH", *KEPT]) == {*SHELL, "PYTHONPATH"}
    code = "import os, sys; print(*os.environ, sys.argv)"
    command = [sys.executable, str(ROOT / "tools" / "unset.py"), sys.executable, "-c", code, "-m", "a b"]
    env = {**SHELL, "LC_ALL": "C.UTF-8"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert ended.stdout == "LC_ALL ['-c', '-m', 'a b']\n", ended.stderr


def test_makefile_commands_run_as_if_nothing_of_spark_were_set() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    recipes = [line for line in lines if line.startswith("\t") and re.search(r"/bin/|\$\(BIN\)", line)]
    assert recipes
    assert [line for line in recipes if not re.match(r"\t([\w=$()]+ )?(\$\(BIN\)/|\$\(UNSET\) )", line)] == []


def test_tests_run_as_if_nothing_of_spark_were_set() -> None:
    code = "import os, unset, conftest; print(*sorted(unset.foreign(os.environ)))"
    env = {**os.environ, **SHELL, "PYTHONPATH": os.pathsep.join(("tests", "tests/support", "tools"))}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "DISTRIBUTOR_RUNS SPARK_CONF_DIR\n", ended.stderr  # conftest.py sets the first


def test_purposes_name_extras_and_groups_that_exist() -> None:
    known = configparser.ConfigParser()
    known.read(ROOT / "setup.cfg")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for purpose in environment.PURPOSES.values():
        assert set(purpose.extras or ()) <= set(known["options.extras_require"])
        assert set(purpose.groups) <= groups.keys()
    used = re.findall(r"\$\(VENVS\)/[\w%.-]+/([\w-]+)\.ok$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(used) == set(environment.PURPOSES)


def test_each_version_is_tested_and_differs_from_the_pinned_one_only_where_it_says_so() -> None:
    known = configparser.ConfigParser()
    known.read(ROOT / "constraints" / "versions.cfg")
    lists = re.findall(r"^(SPARK|TORCH) \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    tested = [f"{name.lower()}-{version}" for name, versions in lists for version in versions.split()]
    assert tested == known.sections()
    constraints = (ROOT / "constraints" / "main.txt").read_text()
    for others in map(known.__getitem__, tested):
        pins = environment.pinned(constraints, others).splitlines()
        assert len(pins) == len(constraints.splitlines())
        assert set(pins) - set(constraints.splitlines()) == {f"{name}=={version}" for name, version in others.items()}


def test_refuses_an_unknown_version(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"versions\.cfg has no spark-5\.0: it has spark-3\.5, "):
        environment.install(tmp_path / "spark-5.0", "versions")
    assert not any(tmp_path.iterdir())


def test_packages_installed_alone_are_pinned() -> None:
    for purpose in environment.PURPOSES.values():
        lines = (environment.CONSTRAINTS / f"{purpose.constraints}.txt").read_text().splitlines()
        assert set(purpose.alone) <= {line.partition("==")[0] for line in lines}


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\necho 3.9.1\n", r"venv has Python 3\.9\.1, but PYTHON is 3\..*: .* remove it first \(make clean\)"),
        (None, r"bin/python does not run, since its interpreter is gone: remove .*venv \(make clean\) and start again"),
    ],
)
def test_an_environment_of_another_python_is_left_alone(script: str | None, says: str, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    if script is None:
        python.symlink_to(tmp_path / "gone")
    else:
        python.write_text(script)
        python.chmod(0o755)
    with pytest.raises(SystemExit, match=says):
        environment.make(tmp_path / "venv")


def test_interpreters_are_found_by_version_and_only_once() -> None:
    minor = ".".join(str(part) for part in sys.version_info[:2])
    interpreters = pythons.interpreters(minor)
    assert interpreters
    assert all(
        version.startswith(f"{minor}.") and environment.version_of(path) == version
        for version, path in interpreters.items()
    )
    assert not any((path.parent.parent / "pyvenv.cfg").exists() for path in interpreters.values())
    assert pythons.interpreters("3.2") == {}


def test_a_version_without_interpreter_is_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    pythons.main("resolve", "3.2")
    assert capsys.readouterr().out == "=== Python 3.2: skipped, since there is no python3.2 on this machine\n"


def wheel(folder: Path, name: str) -> str:
    """A requirement that is met by an empty package of the machine's own disk."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name} @ {path.as_uri()}"


@pytest.mark.long
def test_two_commands_share_an_environment_and_one_installs_at_a_time(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints" / "main.txt").touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "setup.cfg").touch()
    needs = {"lint": wheel(tmp_path, "one"), "docs": wheel(tmp_path, "two")}
    groups = "".join(f'{name} = ["{need}"]\n' for name, need in needs.items())
    (tmp_path / "pyproject.toml").write_text(f"[dependency-groups]\n{groups}")

    ended = make(tmp_path, "-j2", ".venvs/main/lint.ok", ".venvs/main/docs.ok")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "waiting: another make command is installing in this folder" in ended.stdout
    for name in needs:
        assert re.search(rf"installs what {name} needs, .* GB\n", ended.stdout)
        assert re.search(rf"is ready for {name}: \d+ s, [\d.]+ GB\n", ended.stdout)
    assert subprocess.run([tmp_path / ".venvs/main/bin/python", "-c", "import one, two"]).returncode == 0
    assert "is up to date" in make(tmp_path, ".venvs/main/lint.ok", ".venvs/main/docs.ok").stdout

    (tmp_path / "pyproject.toml").write_text('[dependency-groups]\nlint = ["distributor-has-no-such-package"]\n')
    ended = make(tmp_path, ".venvs/main/lint.ok")
    assert ended.returncode == 2
    assert "No matching distribution found for distributor-has-no-such-package" in ended.stderr
    assert "pip could not install what is needed (exit code 1): its output is above" in ended.stderr


def make(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", f"PYTHON={sys.executable}", *arguments],
        cwd=folder,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
