"""Read pickles of torch's checkpoint plans and metadata, and refuse any other class.

Torch reads them with ``pickle.load``, which runs whatever code a pickle names. But metadata is read from checkpoints,
which may come from anywhere, and plans from the rendezvous store, to which any process that reaches it may write.
Source: https://docs.python.org/3/library/pickle.html#restricting-globals
"""

from __future__ import annotations

import enum
import io
import pickle
from typing import Any

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "pathlib": {"PosixPath"},
}

#: Modules that have another name in some versions of Python.
_MOVED = {"pathlib._local": "pathlib"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch":
            import torch

            found = getattr(torch, name, None)
            if isinstance(found, (torch.dtype, torch.layout)):
                return found
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which is not part of a checkpoint's metadata")


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration. Python 3.11.0 to 3.11.3 pickle members as ``getattr(kind, name)``."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"the pickle names {kind!r}.{name}, which is not part of a checkpoint's metadata")


def loads(data: bytes) -> Any:
    """Return the object in a pickle; UnpicklingError if it names anything but plans and metadata."""
    return _Unpickler(io.BytesIO(data)).load()


def dumps(value: object) -> bytes:
    """Return an object as a pickle."""
    return pickle.dumps(value, protocol=4)
