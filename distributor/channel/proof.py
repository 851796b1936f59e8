"""Secrets with which a process proves to the driver that it belongs to a node.

For each job, the driver makes a random key, the *seal*, and Spark sends it to the tasks with their work. A task makes
its node's secret from it, which the agent shows on the channel. Agents and ranks do not get the seal, so the driver can
trust, and unpickle, what comes with a valid secret.

Pickled by value into Spark's Python workers, where other packages may be missing: standard library only.
"""

from __future__ import annotations

import hmac
import os

SEAL_BYTES = 32
_NONCE_BYTES = 16


def make(seal: bytes, node: str) -> str:
    """Return a new secret for a node.

    >>> holds(b"seal", "host-a", make(b"seal", "host-a"))
    True
    """
    nonce = os.urandom(_NONCE_BYTES).hex()
    return nonce + _mark(seal, node, nonce)


def holds(seal: bytes, node: str, secret: str) -> bool:
    """Return whether a secret was made for this node from this seal.

    >>> holds(b"seal", "host-b", make(b"seal", "host-a"))
    False
    """
    nonce, mark = secret[: 2 * _NONCE_BYTES], secret[2 * _NONCE_BYTES :]
    return hmac.compare_digest(mark.encode(errors="replace"), _mark(seal, node, nonce).encode())


def _mark(seal: bytes, node: str, nonce: str) -> str:
    return hmac.new(seal, f"{nonce} {node}".encode(errors="replace"), "sha256").hexdigest()
