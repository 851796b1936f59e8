"""Names of other launchers that do not work here, and what to use instead.

Sources: the public page of the package ``databricks-sdk-air``, and the page "Connect to AI Runtime" of
https://docs.databricks.com/aws/en/machine-learning/ai-runtime
"""

from __future__ import annotations

from distributor.errors import ConfigurationError

_DATA = {
    "UCVolumeDataset": "torch.utils.data.Dataset over the files of /Volumes/..., or of any folder that all ranks have",
    "DataLoader": "torch.utils.data.DataLoader with a DistributedSampler",
    "UCVolumeReader": "torch.distributed.checkpoint.FileSystemReader with a path that all ranks have",
    "UCVolumeWriter": "torch.distributed.checkpoint.FileSystemWriter with a path that all ranks have",
    "Checkpointable": "torch.distributed.checkpoint.stateful.Stateful",
}
_SERVICES = "needs Databricks' services, which are not available here"

#: By module: why its names do not work, and what to use instead of each.
REFUSED = {
    "databricks.air.data": (_SERVICES, _DATA),
    "serverless_gpu.data": (_SERVICES, _DATA),
    "azure.ai.ml": (
        "is not supported",
        {
            "MLClient": "run(job), which runs a job on the Spark session",
            "Output": 'run(..., options={"output_dir": ...}), which keeps the files that ranks write',
            "dsl": "one run() for each step of the pipeline",
            "load_component": "command()",
            "load_job": "command()",
        },
    ),
}


def refusal(module: str, name: str) -> Exception:
    """Return the error for a name that a module lacks: AttributeError, unless :data:`REFUSED` has the name.

    >>> str(refusal("azure.ai.ml", "load_job"))
    'azure.ai.ml.load_job is not supported: use command()'
    """
    reason, instead = REFUSED[module]
    if name not in instead:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ConfigurationError(f"{module}.{name} {reason}: use {instead[name]}")
