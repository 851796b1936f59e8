"""Which differences between driver and nodes matter."""

import platform
from importlib import metadata

import pytest

from distributor.machine import versions
from distributor.values.placement import NodeFacts

DRIVER = {"Python": "3.11.7", "torch": "2.13.0+cpu"}


def facts_of(*found):
    return [
        NodeFacts(index, f"{index}:1", f"host-{index}", "10.0.0.1", 1, versions=each)
        for index, each in enumerate(found)
    ]


def test_versions_of_this_process():
    assert versions.here() == {"Python": platform.python_version(), "torch": metadata.version("torch")}


def test_packages_that_a_launch_path_needs(monkeypatch):
    there = {"torch": "2.13.0", "tensorflow-cpu": "2.21.0", "ray": "2.60.0"}

    def version(name):
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    found = versions.here(["tensorflow", "ray", "jax"])
    assert {name: found[name] for name in found if name != "Python"} == {
        "torch": "2.13.0",
        "tensorflow": "2.21.0",
        "ray": "2.60.0",
    }


def test_torch_may_be_missing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert list(versions.here()) == ["Python"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param([DRIVER, DRIVER], None, id="equal"),
        pytest.param([DRIVER, {"Python": "3.11.2", "torch": "2.13.1"}], None, id="patch-levels"),
        pytest.param([{}, {}], None, id="unknown"),
        pytest.param([DRIVER, {"Python": "3.11.7"}], None, id="no-torch-is-another-error"),
        pytest.param(
            [DRIVER, {**DRIVER, "Python": "3.12.1"}], "Python is 3.12.1 on host-1 and 3.11.7 on the driver", id="python"
        ),
        pytest.param(
            [DRIVER, {**DRIVER, "torch": "2.9.1"}], "torch is 2.9.1 on host-1 and 2.13.0+cpu on host-0", id="torch"
        ),
        *(
            pytest.param(
                [{**DRIVER, package: "2.10.2"}, {**DRIVER, package: "2.9.0"}],
                f"{package} is 2.9.0 on host-1 and 2.10.2 on host-0: ranks need the same version",
                id=package,
            )
            for package in ("jax", "tensorflow", "ray")
        ),
        pytest.param([{"torch": "2.9.0"}, {"torch": "2.9.1"}], None, id="torch-of-the-driver-alone-differs"),
    ],
)
def test_versions_that_break_a_run_are_a_conflict(found, words):
    conflict = versions.conflict(DRIVER, facts_of(*found))
    assert (conflict is None) if words is None else conflict.startswith(words)
    assert versions.conflict(DRIVER, facts_of(*found)[::-1]) == conflict


@pytest.mark.parametrize(
    ("driver", "found", "words"),
    [
        pytest.param(DRIVER, [DRIVER, DRIVER], [], id="equal"),
        pytest.param(
            DRIVER, [DRIVER, {"torch": "2.13.1"}], ["has torch 2.13.1, but host-0 has 2.13.0+cpu"], id="patch"
        ),
        pytest.param(
            DRIVER,
            [DRIVER, {"torch": "2.13.0+cu130"}],
            ["has torch 2.13.0+cu130, but host-0 has 2.13.0+cpu"],
            id="build",
        ),
        pytest.param(
            {"torch": "2.9.0"},
            [DRIVER, DRIVER],
            ["has torch 2.13.0+cpu, but the driver has 2.9.0"],
            id="driver-differs",
        ),
        pytest.param({}, [DRIVER, DRIVER], [], id="no-torch-on-the-driver"),
        pytest.param(DRIVER, [{}, {}], [], id="unknown"),
    ],
)
def test_other_versions_of_torch_are_warned_of(driver, found, words):
    facts = facts_of(*found)
    told = versions.differences({"Python": "3.11.7", **driver}, facts[0], facts[1])
    assert len(told) == len(words)
    assert all(text.startswith(word) for text, word in zip(told, words))
