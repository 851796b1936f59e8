"""Reads the environment variable ``DISTRIBUTOR_COMPAT_CPU``, which makes notebooks for GPUs run on CPUs."""

from __future__ import annotations

from collections.abc import Mapping

from distributor.errors import ConfigurationError

VARIABLE = "DISTRIBUTOR_COMPAT_CPU"  # how many ranks on CPUs each call starts, whatever it asks for


def cpu_ranks(environ: Mapping[str, str]) -> int | None:
    """Return the value of ``DISTRIBUTOR_COMPAT_CPU``; ``None`` if it is unset or empty.

    >>> cpu_ranks({"DISTRIBUTOR_COMPAT_CPU": "2"}), cpu_ranks({})
    (2, None)
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{VARIABLE} must be the number of ranks on CPUs, such as 2, not {text!r}")
    return int(text)
