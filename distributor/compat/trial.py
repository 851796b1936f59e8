"""``DISTRIBUTOR_COMPAT_CPU``, a variable with which notebooks for GPUs can be tried on machines without GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distributor.errors import ConfigurationError

#: The variable with the number of ranks on CPUs that each call of ``distributor.compat`` starts, whatever it requests.
VARIABLE = "DISTRIBUTOR_COMPAT_CPU"


def cpu_ranks(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks on CPUs to try a notebook with; ``None`` if the variable is unset or empty.

    Args:
        environ: usually ``os.environ``.

    Raises:
        ConfigurationError: the variable is not a positive number.

    Example:
        >>> cpu_ranks({"DISTRIBUTOR_COMPAT_CPU": "2"}), cpu_ranks({})
        (2, None)
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{VARIABLE} must be the number of ranks on CPUs, such as 2, not {text!r}")
    return int(text)
