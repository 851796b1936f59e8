"""Decides under which name each version of a file (its content on a node) is kept. The caller changes the files.

Nodes may write different bytes to the same relative path. The version of the node with the lowest rank keeps this path
as its name. The names of other versions end with the ranks of their nodes, for example ``.node-1``. A node's version
is not kept if it is the same as the version of the node with the lowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributor.values.files import fitted


@dataclass(frozen=True)
class Version:
    """The content of a file: its digest (sha256, in hex) and its size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class Put:
    """A change to the files in ``output_dir``: keep a version (the content of a file on some nodes) under a name.

    The file ``source`` in ``output_dir`` is copied to ``name``. If ``source`` is ``None``, the file that has just
    arrived from a node is renamed to ``name``.
    """

    name: str
    source: str | None


@dataclass(frozen=True)
class Remove:
    """A change to the files in ``output_dir``: remove the file with the given name."""

    name: str


def names(path: str, held: Mapping[int, Version]) -> dict[str, Version]:
    """Return which versions of a file (its contents on the nodes) must be kept, each under the name that it gets.

    Args:
        path: the file's path in the ranks' current directory.
        held: each node's version (the file's content on this node), by node rank.

    >>> list(names("log.txt", {2: Version("b", 1), 0: Version("a", 1), 1: Version("a", 1)}))
    ['log.txt', 'log.txt.node-2']
    """
    if not held:
        return {}
    first, *others = sorted(held)
    kept = {path: held[first]}
    return kept | {
        fitted(path, f".node-{node}"): held[node] for node in others if held[node].digest != held[first].digest
    }


def steps(path: str, before: Mapping[str, Version], after: Mapping[str, Version]) -> list[Put | Remove]:
    """Return the steps (moves, copies, removals) that turn the kept versions of a file from ``before`` to ``after``.

    ``before`` and ``after`` contain versions (contents) of the file by their names in ``output_dir``. The step that
    overwrites the file at ``path`` comes after all copies, because this file's old content may have to be copied to
    another name first, as in this example.

    >>> a, b = Version("a", 1), Version("b", 1)
    >>> steps("x", {"x": b}, {"x": a, "x.node-1": b})
    [Put(name='x.node-1', source='x'), Put(name='x', source=None)]
    """
    there = {version.digest: name for name, version in before.items()}
    new = [name for name, version in after.items() if name not in before or before[name].digest != version.digest]
    puts = [Put(name, there.get(after[name].digest)) for name in sorted(new, key=lambda name: name == path)]
    return [*puts, *(Remove(name) for name in before if name not in after)]


class Versions:
    """The versions (contents) of all files that the nodes of a run have sent.

    Args:
        before: sizes in bytes of the files that were in ``output_dir`` before the run, by name. A version that gets the
            name of such a file replaces that file.
    """

    def __init__(self, before: Mapping[str, int] | None = None) -> None:
        self._held: dict[str, dict[int, Version]] = {}
        self._sizes = dict(before or {})  # the sizes of all files that are kept, by name
        #: The size of all files that are kept, in bytes.
        self.size = sum(self._sizes.values())

    def kept(self, path: str) -> dict[str, Version]:
        """Return the versions of a file (its contents on the nodes) that are kept, each under its name."""
        return names(path, self._held.get(path, {}))

    def knows(self, path: str, version: Version) -> bool:
        """Return whether a version (content) of a file is already kept."""
        return version in self.kept(path).values()

    def growth(self, path: str, node: int, version: Version) -> int:
        """Return by how many bytes a node's new version (content) of a file would change the size of all kept files."""
        after = names(path, {**self._held.get(path, {}), node: version})
        gone = sum(self._sizes.get(name, 0) for name in self.kept(path).keys() | after.keys())
        return sum(each.size for each in after.values()) - gone

    def change(self, path: str, node: int, version: Version | None) -> list[Put | Remove]:
        """Record that a file has changed on a node. Return what the caller must therefore change in ``output_dir``.

        Args:
            path: the file's path in the ranks' current directory.
            node: the node's rank.
            version: the file's new content on this node; ``None`` if the node has removed the file.
        """
        before = self.kept(path)
        held = self._held.setdefault(path, {})
        if version is None:
            held.pop(node, None)
        else:
            held[node] = version
        after = self.kept(path)
        self._note({name: after[name].size if name in after else None for name in before.keys() | after.keys()})
        return steps(path, before, after)

    def saved(self, path: str) -> tuple[dict[int, Version], dict[str, int | None]]:
        """Return what :meth:`restore` needs to undo a change of a file."""
        held = dict(self._held.get(path, {}))
        return held, {name: self._sizes.get(name) for name in (path, *self.kept(path))}

    def restore(self, path: str, saved: tuple[dict[int, Version], dict[str, int | None]]) -> None:
        """Undo a call of :meth:`change`, because ``output_dir`` could not be changed accordingly.

        Args:
            path: the file's path in the ranks' current directory.
            saved: what :meth:`saved` returned before that call of :meth:`change`.
        """
        held, sizes = saved
        changed = dict.fromkeys(self.kept(path), None)
        self._held[path] = held
        self._note({**changed, **sizes})

    def _note(self, sizes: Mapping[str, int | None]) -> None:
        for name, size in sizes.items():
            self.size -= self._sizes.pop(name, 0)
            if size is not None:
                self._sizes[name] = size
                self.size += size

    @property
    def conflicts(self) -> list[str]:
        """The paths of files whose contents differ between nodes."""
        return sorted(path for path in self._held if len(self.kept(path)) > 1)
