"""Under which name each node's content of a file is kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from distributor.machine.storage import Folder
from distributor.output.kept_files import KeptFiles, Version
from distributor.values.files import incoming, is_incoming

Change = tuple[int, str | None]


def version(content: str) -> Version:
    return Version(hashlib.sha256(content.encode()).hexdigest(), len(content))


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def apply(kept: KeptFiles, folder: Path, node: int, content: str | None) -> int:
    """Make one change as the driver does; return the announced growth."""
    if content is None:
        kept.remove("x", node)
        return 0
    growth = kept.growth("x", node, version(content))
    if not kept.keep("x", node, version(content), None):
        (folder / "arrived").write_text(content)
        assert kept.keep("x", node, version(content), "arrived")
    return growth


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(0, "a"), (1, "b")], {"x": "a", "x.node-1": "b"}),
        ([(1, "b"), (0, "a")], {"x": "a", "x.node-1": "b"}),  # in whichever order they arrive
        ([(2, "c"), (1, "b"), (0, "a")], {"x": "a", "x.node-1": "b", "x.node-2": "c"}),
        ([(0, "a"), (0, "b")], {"x": "b"}),
        ([(0, "a"), (1, "b"), (1, "c")], {"x": "a", "x.node-1": "c"}),
        ([(0, "a"), (1, "a")], {"x": "a"}),  # equal content is kept once
        ([(1, "a"), (0, "a")], {"x": "a"}),
        ([(0, "a"), (1, "b"), (1, "a")], {"x": "a"}),
        ([(0, "a"), (1, "b"), (0, "b")], {"x": "b"}),
        ([(1, "a"), (2, "b"), (0, "b")], {"x": "b", "x.node-1": "a"}),
        ([(0, "a"), (1, "b"), (0, None)], {"x.node-1": "b"}),  # nobody takes the owner's place
        ([(0, "a"), (0, None), (1, "b")], {"x.node-1": "b"}),
        ([(1, "b"), (1, None), (0, "a")], {"x": "a"}),
        ([(0, "a"), (1, "a"), (0, None)], {}),
        ([(0, "a"), (1, "b"), (1, None)], {"x": "a"}),
        ([(1, "a"), (0, "a"), (1, None)], {"x": "a"}),
        ([(1, None)], {}),
    ],
)
def test_the_lowest_node_that_wrote_a_path_owns_it(
    changes: list[Change], expected: dict[str, str], tmp_path: Path
) -> None:
    kept = KeptFiles(Folder(tmp_path))
    for node, content in changes:
        apply(kept, tmp_path, node, content)
    assert files(tmp_path) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(0, None)], {}),
        ([(1, None)], {"x": "before"}),  # the first node's
        ([(1, "b"), (0, None)], {"x": "b"}),
        ([(1, "b"), (1, None), (0, None)], {}),
    ],
)
def test_a_file_from_before_the_run_is_the_first_nodes(
    changes: list[Change], expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("before")
    kept = KeptFiles(Folder(tmp_path), {"x": 6})
    for node, content in changes:
        apply(kept, tmp_path, node, content)
    assert files(tmp_path) == expected
    assert kept.size == sum(map(len, expected.values()))


all_changes = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "bb", None])), max_size=12)


@given(all_changes)
def test_each_file_has_the_last_content_of_its_node(changes: list[Change]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = KeptFiles(Folder(folder))
        for node, content in changes:
            before = kept.size
            growth = apply(kept, folder, node, content)
            assert kept.size <= before + max(growth, 0)
        there = files(folder)
        assert kept.size == sum(map(len, there.values()))
        assert kept.conflicts == (["x"] if there.keys() - {"x"} else [])
        last = dict(changes)
        owner = min((node for node, content in changes if content is not None), default=0)
        assert there.get("x") == last.get(owner)
        for file in there.keys() - {"x"}:
            assert there[file] == last[int(file.removeprefix("x.node-"))]
            assert there[file] != there.get("x")


def test_a_failed_change_leaves_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptFiles(Folder(tmp_path), {"x": 6})
    (tmp_path / "arrived").write_text("12345678")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(PermissionError):
            kept.keep("x", 0, version("12345678"), "arrived")
    assert kept.size == 6


def test_long_names_fit(tmp_path: Path) -> None:
    kept, path = KeptFiles(Folder(tmp_path)), f"{'训' * 84}.pt"
    for node, content in ((0, "a"), (12, "b")):
        (tmp_path / "arrived").write_text(content)
        kept.keep(path, node, version(content), "arrived")
    (second,) = files(tmp_path).keys() - {path}
    assert second.startswith("训训训") and second.endswith(".node-12")
    for name in (second, incoming(path, 12), incoming(path, 12, 4194304), incoming("a" * 255, 0)):
        assert len(os.path.basename(name).encode()) <= 255
        assert name == second or is_incoming(name)
    assert incoming("a" * 255, 0) != incoming("a" * 254 + "b", 0)
