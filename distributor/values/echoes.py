"""Tells errors that follow from the loss of another rank, such as a broken connection, from errors of a rank's own."""

from __future__ import annotations

import re

from distributor.values.outcome import Failure

#: Matches errors that gloo, NCCL, torch's store, JAX and ``runtime.rank0_first`` raise when another rank is lost.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused|was aborted)|broken pipe|socket timeout|timed out|gloo|nccl|tcpstore"
    r"|remote process exited|peer|unavailable:|deadline_exceeded|heartbeat"
    r"|failed in (the with block|the call)( \(.*\))?; the exception raised there says why",
    re.IGNORECASE,
)

#: Types of exceptions of torch.distributed.
TORCH_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError")

#: Types of exceptions of Python, torch and TensorFlow that always mean the loss of another rank.
_CONSEQUENCE_KINDS = (
    "AbortedError",
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "UnavailableError",
    *TORCH_KINDS,
)

#: Types of exceptions of Python and JAX that mean the loss of another rank only if their message says so.
_RUNTIME_KINDS = ("JaxRuntimeError", "RuntimeError", "XlaRuntimeError")

#: Matches messages that mean the loss of another rank in exceptions of any type. For example, JAX raises a
#: ``ValueError`` if a collective of gloo fails.
_TRANSPORT = re.compile(r"gloo/transport/|gloo \w+ failed", re.IGNORECASE)

#: Between the tracebacks of two exceptions, of which the first has led to the second.
_THEN = re.compile(r"^(?:The above exception was the direct cause of|During handling of the above exception, )", re.M)

#: What an exception's traceback ends with.
_RAISED = re.compile(r"^(?:\w+\.)*(\w+): (.*)", re.M)


def is_echo(failure: Failure) -> bool:
    """Return whether a rank's exception says that a connection or collective has broken, or follows from such a one."""
    if failure.kind in _CONSEQUENCE_KINDS or _is_broken(failure.kind, failure.message):
        return True
    *causes, _ = _THEN.split(failure.traceback)
    return any(
        kind in TORCH_KINDS or _is_broken(kind, text) for cause in causes for kind, text in _RAISED.findall(cause)
    )


def _is_broken(kind: str, message: str) -> bool:
    pattern = _CONSEQUENCE if kind in _RUNTIME_KINDS else _TRANSPORT
    return pattern.search(message) is not None
