"""The input of every barrier task."""

from __future__ import annotations

from typing import Any, TypedDict

from distributor.channel.connections import Endpoint
from distributor.values.job import Warmth


class Shipment(TypedDict):
    """Plain values, since a task's Python worker cannot import this package."""

    job_id: str
    job: bytes  # pickled, without call and parts
    call: Any  # a large one: the name of a file that Spark delivers, or a broadcast; None if there is none
    parts: dict[str, str]  # names of large parts of the job, and of the files in which Spark delivers them
    package: bytes | str  # this package as a zip, or the name of a file that Spark delivers
    endpoint: Endpoint | None  # where the driver listens, if it does
    exchange: bool  # of facts: through the driver if it can be reached; otherwise with allGather
    silence: float  # seconds after which a driver that does not answer counts as lost
    warmth: Warmth | None  # None: no warm process
    driver_host: str
    gpu: str | None  # Spark's name of the resource; None if the run uses no GPUs
    most_tasks: int | None  # of the job on one executor; None for any number
    ports: int  # how many each task reserves for the launch path
    packages: list[str]  # whose versions a task reports, besides that of torch
    chunk: int  # bytes of a piece of a return value
    in_place: bool  # tasks run in the driver's current directory
    patience: float  # seconds for which a task of a failed run waits to be killed
    seal: bytes  # from which a task makes the secret of its node; see channel.proof
