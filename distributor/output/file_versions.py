"""Decides under which name each *version* of a file, its content on a node, is kept. The caller changes the files.

Nodes may write different bytes to the same relative path. The version of the node with the lowest rank keeps this path
as its name. Versions that differ from it get names that end with their node's rank, for example ``.node-1``.
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
    """Keep a version under a name: a copy of ``source`` or, if it is ``None``, the file that has just arrived."""

    name: str
    source: str | None


@dataclass(frozen=True)
class Remove:
    """Remove the file with the given name."""

    name: str


def names(path: str, held: Mapping[int, Version]) -> dict[str, Version]:
    """Return which versions of a file must be kept, each under its name. ``held`` has each node's, by node rank.

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
    """Return the steps that turn the kept versions of a file, by name, from ``before`` to ``after``.

    The file at ``path`` is overwritten last, because its old content may have to be copied to another name first.

    >>> a, b = Version("a", 1), Version("b", 1)
    >>> steps("x", {"x": b}, {"x": a, "x.node-1": b})
    [Put(name='x.node-1', source='x'), Put(name='x', source=None)]
    """
    there = {version.digest: name for name, version in before.items()}
    new = [name for name, version in after.items() if name not in before or before[name].digest != version.digest]
    puts = [Put(name, there.get(after[name].digest)) for name in sorted(new, key=lambda name: name == path)]
    return [*puts, *(Remove(name) for name in before if name not in after)]


class Versions:
    """The versions of all files that the nodes of a run have sent, and the sizes of files from before the run."""

    def __init__(self, before: Mapping[str, int] | None = None) -> None:
        self._held: dict[str, dict[int, Version]] = {}
        self._sizes = dict(before or {})  # the sizes of all files that are kept, by name
        self.size = sum(self._sizes.values())  # of all files that are kept, in bytes

    def kept(self, path: str) -> dict[str, Version]:
        return names(path, self._held.get(path, {}))

    def knows(self, path: str, version: Version) -> bool:
        return version in self.kept(path).values()

    def growth(self, path: str, node: int, version: Version) -> int:
        """Return by how many bytes a node's new version of a file would change the size of all kept files."""
        after = names(path, {**self._held.get(path, {}), node: version})
        gone = sum(self._sizes.get(name, 0) for name in self.kept(path).keys() | after.keys())
        return sum(each.size for each in after.values()) - gone

    def change(self, path: str, node: int, version: Version | None) -> list[Put | Remove]:
        """Record a node's new version; ``None`` if it has removed the file. Return what to change in ``output_dir``."""
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
        """Undo a call of :meth:`change`, because ``output_dir`` could not be changed accordingly."""
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
        return sorted(path for path in self._held if len(self.kept(path)) > 1)
