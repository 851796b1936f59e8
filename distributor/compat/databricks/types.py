"""GPU types as Databricks names them.

Sources: https://docs.databricks.com/aws/en/machine-learning/ai-runtime/distributed-training (``gpu_type``),
https://databricks.github.io/sdk-js/api/variables/_databricks_sdk-jobs.v2.ComputeSpec_AcceleratorType.html
(``accelerator_type``).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from distributor.errors import ConfigurationError


class GPUType(enum.Enum):
    """GPU types, for code that uses Databricks' enum. Any other type can be given as a string, such as ``"L40S"``."""

    A10 = "A10"
    H100 = "H100"


@dataclass(frozen=True)
class Accelerator:
    """The GPU type and the GPU count in a name such as ``GPU_8xH100``."""

    type: str
    number: int | None = None


def gpu_type(name: str, value: Any) -> str | None:
    """Return the GPU type that the argument ``name`` says, in upper case.

    >>> gpu_type("gpu_type", "h100"), gpu_type("gpu_type", GPUType.A10), gpu_type("gpu_type", None)
    ('H100', 'A10', None)
    """
    text = value.value if isinstance(value, enum.Enum) else value
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9]+", text):
        raise ConfigurationError(f"{name} must be the name of a GPU model such as 'H100' or 'A10', not {value!r}")
    return text.upper()


def accelerator(name: str, value: Any) -> Accelerator | None:
    """Return the GPU type and the number of GPUs that the argument ``name`` says.

    >>> accelerator("accelerator_type", "GPU_8xH100")
    Accelerator(type='H100', number=8)
    """
    text = value.value if isinstance(value, enum.Enum) else value
    if text is None:
        return None
    match = re.fullmatch(r"GPU_([1-9]\d*)x([A-Za-z0-9]+)", text) if isinstance(text, str) else None
    if match is None:
        raise ConfigurationError(
            f"{name} must be a number and a GPU model, such as 'GPU_8xH100' or 'GPU_1xA10', not {value!r}"
        )
    return Accelerator(match[2].upper(), int(match[1]))
