"""How this package's processes are started, and what they show of themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest

from distributor.machine import bootstrap


def test_what_is_shown_cannot_become_longer() -> None:
    with pytest.raises(ValueError, match="NAME=longer.* the new text is longer"):
        bootstrap.overwrite("NAME=old", "NAME=longer", "environ")


def test_a_process_of_others_is_no_part_whatever_its_arguments_are() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "root", b"\xff"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert not bootstrap.is_part(process.pid, *bootstrap.FORKED)
        process.stdin.close()


PROBE = """
import json, sys
def main(*args):
    print(json.dumps({"path": sys.path, "args": args, "json": json.__file__}))
"""


SHADOW = "raise ImportError('shadowed')"


@pytest.fixture
def roots(tmp_path):
    """A package of our name with a module that tells where it runs, as a zip and as a folder beside a trap."""
    zipped, folder = tmp_path / "package.zip", tmp_path / "root"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("distributor/__init__.py", "")
        archive.writestr("distributor/node/__init__.py", "")
        archive.writestr("distributor/node/agent.py", PROBE)
    (folder / "distributor" / "node").mkdir(parents=True)
    (folder / "distributor" / "__init__.py").write_text("")
    (folder / "distributor" / "node" / "__init__.py").write_text("")
    (folder / "distributor" / "node" / "agent.py").write_text(PROBE)
    (folder / "json.py").write_text(SHADOW)
    return {"zip": str(zipped), "folder": str(folder)}


@pytest.mark.parametrize(("kind", "on_path"), [("zip", 1), ("folder", 0)])
def test_the_package_is_imported_from_its_root_and_shadows_nothing(roots, tmp_path, kind, on_path):
    cwd = tmp_path / "cwd"
    (cwd / "distributor").mkdir(parents=True)
    (cwd / "distributor" / "__init__.py").write_text(SHADOW)
    (cwd / "json.py").write_text(SHADOW)
    python, *rest = bootstrap.command(roots[kind], "agent", "4711", "control=3")
    another = tmp_path / "another"
    (another / "distributor").mkdir(parents=True)
    (another / "distributor" / "__init__.py").write_text(SHADOW)
    env = {**os.environ, "PYTHONPATH": str(another)}
    done = subprocess.run([python, "-S", *rest], cwd=cwd, env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["args"] == ["4711", "control=3"]
    assert told["path"].count(roots[kind]) == on_path
    assert not {"", str(cwd)} & set(told["path"])
