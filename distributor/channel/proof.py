"""What proves to the driver that a process speaks for a node: a secret that only the run's tasks can make.

The driver makes a *seal* for each run, and Spark brings it to the tasks with their work. No agent and no rank gets it.
A task makes the secret of its node from it, and the node's agent shows that secret over the channel. So the driver may
unpickle what such a node sends there. Standard library only; Spark's workers use this module by value.
"""

from __future__ import annotations

import hmac
import os

#: Number of bytes of a seal, and of the random part of a secret.
SEAL_BYTES = 32
_NONCE_BYTES = 16


def make(seal: bytes, node: str) -> str:
    """Return a new secret of a node.

    Example:
        >>> holds(b"seal", "host-a", make(b"seal", "host-a"))
        True
    """
    nonce = os.urandom(_NONCE_BYTES).hex()
    return nonce + _mark(seal, node, nonce)


def holds(seal: bytes, node: str, secret: str) -> bool:
    """Return whether a secret was made for a node with this seal.

    >>> holds(b"seal", "host-b", make(b"seal", "host-a"))
    False
    """
    nonce, mark = secret[: 2 * _NONCE_BYTES], secret[2 * _NONCE_BYTES :]
    return hmac.compare_digest(mark.encode(errors="replace"), _mark(seal, node, nonce).encode())


def _mark(seal: bytes, node: str, nonce: str) -> str:
    return hmac.new(seal, f"{nonce} {node}".encode(errors="replace"), "sha256").hexdigest()
