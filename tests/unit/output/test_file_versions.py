"""Which name each version of a file gets."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hypothesis import given, strategies as st

from distributor.machine.storage import Folder
from distributor.output.file_versions import Version, Versions, names
from distributor.output.sink import apply
from distributor.values.files import incoming, is_incoming


def version(content: str) -> Version:
    return Version(hashlib.sha256(content.encode()).hexdigest(), len(content))


changes = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "bb", None])), max_size=12)


@given(changes)
def test_what_is_kept_depends_on_the_last_versions_only(told: list[tuple[int, str | None]]) -> None:
    """However they came; performed in a folder, each step finds what it needs."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store, versions, held = Folder(Path(folder)), Versions(), {}
        for node, content in told:
            new = None if content is None else version(content)
            came = None
            if new is not None and content is not None and not versions.knows("x", new):
                came = "came"
                Path(folder, came).write_text(content)
            apply(store, versions.change("x", node, new), came)
            held[node] = content
        last = {node: content for node, content in held.items() if content is not None}
        expected = names("x", {node: version(content) for node, content in last.items()})
        there = {path.name: path.read_text() for path in Path(folder).iterdir()}
        assert {name: version(content) for name, content in there.items()} == expected
        assert versions.size == sum(map(len, there.values()))
        assert versions.conflicts == (["x"] if len(there) > 1 else [])


def test_the_first_nodes_version_keeps_the_name() -> None:
    a, b = version("a"), version("b")
    assert names("x", {2: b, 1: a, 3: a}) == {"x": a, "x.node-2": b}
    assert names("x", {}) == {}


def test_the_names_of_long_files_fit() -> None:
    a, b, path = version("a"), version("b"), f"ckpt/{'训' * 84}.pt"
    first, second = names(path, {0: a, 12: b})
    assert first == path
    assert second.startswith("ckpt/训训训")
    assert second.endswith(".node-12")
    for name in (second, incoming(path, 12), incoming(path, 12, 4194304), incoming("a" * 255, 0)):
        assert len(os.path.basename(name).encode()) <= 255
        assert name == second or is_incoming(name)
    assert incoming("a" * 255, 0) != incoming("a" * 254 + "b", 0)


def test_an_empty_folder_goes_with_its_last_file(tmp_path: Path) -> None:
    store = Folder(tmp_path / "out")
    (tmp_path / "out/a/b").mkdir(parents=True)
    (tmp_path / "out/a/b/c.txt").touch()
    store.remove("a/b/c.txt")
    assert list((tmp_path / "out").iterdir()) == []
    store.remove("absent")
