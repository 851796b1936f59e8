"""The files of docker/: linted, valid, and in step with each other. `make docker-test` builds and runs the image."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SCRIPTS = sorted(DOCKER.glob("*.sh"))
COMPOSE = ("compose.yaml", "compose.cuda.yaml")
_BIN = Path(sys.executable).parent


def run(*command: object, **options: Any) -> str:
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=180, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def services(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())["services"]
    return parsed


def test_the_dockerfile_is_linted() -> None:
    run(_BIN / "hadolint", "--config", DOCKER / ".hadolint.yaml", DOCKER / "Dockerfile")


def test_the_scripts_are_linted() -> None:
    assert len(SCRIPTS) == 4
    run(_BIN / "shellcheck", *SCRIPTS)
    for script in SCRIPTS:
        assert "set -euo pipefail" in script.read_text(), script
        assert os.access(script, os.X_OK), script


@pytest.mark.parametrize("name", COMPOSE)
@pytest.mark.slow
def test_compose_files_follow_the_specification(name: str) -> None:
    """By the JSON schema of the compose specification that check-jsonschema carries."""
    run(_BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / name)


def test_the_base_is_pinned_and_the_last_stage_has_neither_compiler_nor_root() -> None:
    assert re.search(r"^ARG BASE=\S+:\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
    last = DOCKERFILE[DOCKERFILE.rindex("FROM ") :]
    for tool in ("g++", "gcc", "python3-dev", "build-essential"):
        assert tool not in last
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    admitted = re.findall(r"^!(.*)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    sources = [part for line in copied for part in line.split()[:-1] if not part.startswith("--")]
    assert sorted(admitted) == sorted(set(sources))
    for source in sources:
        assert (ROOT / source).exists(), source


def test_extras_are_those_of_the_package() -> None:
    known = configparser.ConfigParser()
    known.read(ROOT / "setup.cfg")
    ((extras, group),) = re.findall(r"'\.\[(.*?)\]' --group (\w+)", DOCKERFILE)
    for extra in extras.split(","):
        assert known.has_option("options.extras_require", extra), extra
    assert group in tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]


def test_nothing_but_this_machine_reaches_the_ports() -> None:
    ports = [port for name in COMPOSE for service in services(name).values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports), ports


def test_executors_reach_the_driver_by_the_name_of_its_service() -> None:
    lines = (DOCKER / "spark-defaults.conf").read_text().splitlines()
    settings = dict(line.split() for line in lines if line and not line.startswith("#"))
    hosts = services("compose.yaml")
    master = re.fullmatch(r"spark://(\w+):7077", settings["spark.master"])
    assert master is not None
    assert hosts[master[1]]["environment"]["SPARK_MASTER_HOST"] == hosts[master[1]]["hostname"] == master[1]
    assert hosts[settings["spark.driver.host"]]["command"] == ["jupyter"]


def test_variables_of_the_compose_files_are_explained() -> None:
    text = "".join((DOCKER / name).read_text() for name in COMPOSE)
    example = (DOCKER / ".env.example").read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used == set(re.findall(r"^#?([A-Z_]+)=", example, re.MULTILINE))


def test_the_discovery_script_names_all_gpus(tmp_path: Path) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\n[ "$1" = --query-gpu=index ] && printf "0\\n1\\n"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    printed = run(DOCKER / "gpus.sh", env={**os.environ, "PATH": path})
    assert json.loads(printed) == {"name": "gpu", "addresses": ["0", "1"]}
    fake.write_text("#!/bin/sh\nexit 9\n")
    ended = subprocess.run([DOCKER / "gpus.sh"], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert ended.returncode == 9
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("device", "needed", "says"),
    [
        ("cpu", ["torch", "sympy"], None),
        ("cuda", ["torch", "nvidia-cudnn-cu13"], None),
        ("cpu", ["torch", "nvidia-cudnn-cu13"], "the index has torch for cuda, but DEVICE is cpu: set TORCH_INDEX"),
        ("cuda", ["torch", "sympy"], "the index has torch for cpu, but DEVICE is cuda: set TORCH_INDEX"),
        ("gpu", ["torch"], "DEVICE must be cpu or cuda, not 'gpu'"),
    ],
)
def test_refuses_to_build_with_the_wrong_torch(
    tmp_path: Path, device: str, needed: list[str], says: str | None
) -> None:
    report = tmp_path / "torch.json"
    report.write_text(json.dumps({"install": [{"metadata": {"name": name}} for name in needed]}))
    command = [sys.executable, str(DOCKER / "check_torch.py"), device, str(report)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (ended.returncode == 0) == (says is None)
    assert says is None or ended.stderr.startswith(says)


def test_jupyter_does_not_start_without_a_token() -> None:
    env = {**os.environ, "JUPYTER_TOKEN": ""}
    ended = subprocess.run([DOCKER / "entrypoint.sh", "jupyter"], capture_output=True, text=True, env=env, timeout=180)
    assert ended.returncode == 1
    assert ended.stderr.startswith("JUPYTER_TOKEN is empty")


def test_each_block_of_the_readme_is_run_or_says_why_not() -> None:
    readme = (DOCKER / "README.md").read_text()
    tested = (DOCKER / "test.sh").read_text() + (DOCKER / "smoke.sh").read_text()
    blocks = re.findall(r"(<!-- not run: .+? -->\n)?```sh\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == readme.count("```sh\n") > 3
    for marked, block in blocks:
        for line in block.splitlines():
            assert marked or line in tested or line == "make docker-test", line
