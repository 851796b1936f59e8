"""Which Java Spark would start, and what is said when it cannot."""

import re

import pytest

from distributor.schedulers.spark import java


@pytest.fixture
def folder(tmp_path):
    """A folder for the PATH, with a java that tells its version as real ones do."""

    def make(told):
        program = tmp_path / "bin" / "java"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho '{told}' >&2\n")
        program.chmod(0o755)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("told", "pyspark", "says"),
    [
        ('openjdk version "17.0.15" 2025-04-15', "4.3.0", None),
        ('openjdk version "25" 2025-09-16', "4.3.0", None),
        (
            'openjdk version "11.0.2" 2019-01-15',
            "4.3.0",
            r"Java 11 .* too old for PySpark 4\.3\.0, which needs 17 or later: install Ja",
        ),
        ('java version "1.8.0_402"', "4.0.0", r"Java 8 \(.*/bin/java, the first on the PATH\) is too old"),
        ('java version "1.8.0_402"', "3.5.9", None),
        ("something else", "4.3.0", None),
    ],
)
def test_versions(folder, told, pyspark, says):
    path = folder(told) / "bin"
    problem = java.problem(pyspark, {"PATH": str(path)})
    if says is None:
        assert problem is None
    else:
        assert re.match(says, problem)


def test_java_home_comes_before_the_path(folder):
    home = folder('openjdk version "11.0.2"')
    assert ", JAVA_HOME) is too old" in java.problem("4.3.0", {"JAVA_HOME": str(home), "PATH": "/usr/bin"})


def test_no_java():
    assert java.problem("4.3.0", {"PATH": "/nowhere"}) == (
        "no Java found (no java on the PATH, and JAVA_HOME is not set): install Java 17 or later (Debian: apt-get "
        "install openjdk-17-jre-headless)"
    )


def test_a_java_home_without_java(tmp_path):
    problem = java.problem("4.3.0", {"JAVA_HOME": str(tmp_path)})
    assert problem.startswith(f"{tmp_path}/bin/java cannot be run (")
    assert "set JAVA_HOME to a folder with bin/java, or install Java 17" in problem


@pytest.mark.parametrize(("name", "below"), [("SPARK_CONF_DIR", ""), ("SPARK_HOME", "conf")])
def test_what_spark_may_set_by_itself_is_not_guessed(tmp_path, name, below):
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / below / "spark-env.sh").touch()
    assert java.problem("4.3.0", {"PATH": "", name: str(tmp_path)}) is None
