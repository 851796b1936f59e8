"""The files in ``output_dir``: which node's content has a path as its name, and how large all files are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributor.machine.storage import Storage
from distributor.values.files import fitted


@dataclass(frozen=True)
class Version:
    """The content of a file: its digest (sha256, in hex) and its size in bytes."""

    digest: str
    size: int


class KeptFiles:
    """Keeps files of nodes under names that do not depend on the order in which they arrive.

    The lowest node that has written a path owns it: its content is kept there, and nobody's if the node removes the
    file. Other nodes' content is kept under names such as ``log.txt.node-1``, unless it is what the owner's file has.
    """

    def __init__(self, storage: Storage, before: Mapping[str, int] | None = None) -> None:
        self._storage = storage
        self._owners: dict[str, int] = {}
        self._kept: dict[str, dict[int, Version]] = {}  # by path and node
        self._sizes = dict(before or {})  # of all files by name, also of those from before the run
        self.size = sum(self._sizes.values())  # of all files together: no file that arrives adds them up again

    @property
    def conflicts(self) -> list[str]:
        """The paths of which other nodes than the owner have other content."""
        return sorted(path for path, kept in self._kept.items() if kept.keys() - {self._owners.get(path)})

    def growth(self, path: str, node: int, version: Version) -> int:
        """Return by how many bytes a node's version of a file makes all files larger."""
        owner = self._owners.get(path, node)
        if version == self._kept.get(path, {}).get(owner):
            return 0
        replaced = 0 if node < owner else self._sizes.get(self._name(path, node), 0)
        return version.size - replaced

    def keep(self, path: str, node: int, version: Version, arrived: str | None) -> bool:
        """Keep a node's version of a file; ``False`` if that takes its bytes, and none have ``arrived``.

        ``arrived`` is the temporary name of the bytes. OSError if the storage cannot be changed.
        """
        kept, owner = self._kept.setdefault(path, {}), self._owners.get(path, node)
        if version in (kept.get(owner), kept.get(node)):
            if node < owner:
                self._owners[path], kept[node] = node, kept.pop(owner)
            elif version == kept.get(owner) and node > owner:
                self.remove(path, node)
            if arrived is not None:
                self._storage.remove(arrived)
            return True
        if arrived is None:
            return False
        if node < owner and owner in kept:
            self._move(path, fitted(path, f".node-{owner}"), kept[owner].size)
        self._owners[path] = min(node, owner)
        self._move(arrived, self._name(path, node), version.size)
        kept[node] = version
        if node <= owner:
            for other in [other for other in kept if other != node and kept[other] == version]:
                self.remove(path, other)
        return True

    def remove(self, path: str, node: int) -> None:
        """Remove a node's version of a file, if it is kept. The first node owns the files from before the run."""
        if node == 0 and not self._kept.get(path) and path in self._sizes:
            self._storage.remove(path)
            self._forget(path)
        if node in self._kept.get(path, {}):
            name = self._name(path, node)
            self._storage.remove(name)
            self._forget(name)
            del self._kept[path][node]

    def _name(self, path: str, node: int) -> str:
        return path if node == self._owners.get(path, node) else fitted(path, f".node-{node}")

    def _move(self, source: str, name: str, size: int) -> None:
        self._storage.move(source, name)
        self._forget(source)
        self._forget(name)  # which the move has replaced
        self._sizes[name] = size
        self.size += size

    def _forget(self, name: str) -> None:
        self.size -= self._sizes.pop(name, 0)
