"""Make and check the secrets with which a process proves to the driver that it belongs to a certain node.

For each job of a run, the driver makes a random key, the *seal*. Spark sends the seal to the tasks with their work.
Agents and ranks do not get the seal, so only tasks can make secrets. A task makes its node's secret from the seal, and
the node's agent sends this secret over the channel. The driver can therefore trust, and unpickle, what an agent with a
valid secret sends.

This module uses the standard library only, because it is pickled by value into Spark's Python workers, where other
packages may be missing.
"""

from __future__ import annotations

import hmac
import os

#: Numbers of bytes of a seal (the driver's random key), and of the random part of a secret that is made from a seal.
SEAL_BYTES = 32
_NONCE_BYTES = 16


def make(seal: bytes, node: str) -> str:
    """Return a new secret for a node, made from the driver's random key (the seal).

    Example:
        >>> holds(b"seal", "host-a", make(b"seal", "host-a"))
        True
    """
    nonce = os.urandom(_NONCE_BYTES).hex()
    return nonce + _mark(seal, node, nonce)


def holds(seal: bytes, node: str, secret: str) -> bool:
    """Return whether a secret was made for this node from this seal, the driver's random key.

    >>> holds(b"seal", "host-b", make(b"seal", "host-a"))
    False
    """
    nonce, mark = secret[: 2 * _NONCE_BYTES], secret[2 * _NONCE_BYTES :]
    return hmac.compare_digest(mark.encode(errors="replace"), _mark(seal, node, nonce).encode())


def _mark(seal: bytes, node: str, nonce: str) -> str:
    return hmac.new(seal, f"{nonce} {node}".encode(errors="replace"), "sha256").hexdigest()
