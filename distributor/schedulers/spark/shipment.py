"""The input of every barrier task."""

from __future__ import annotations

from typing import TypedDict

from distributor.channel.lines import Endpoint
from distributor.values.job import Warmth


class Shipment(TypedDict):
    """The input of every task: plain values, since this package is not importable in the worker.

    Attributes:
        job_id: identifier of the job.
        job: the pickled job, without the parts that travel separately.
        parts: names of the files that hold the parts that travel separately, by part. Spark delivers these files.
        package: the zip of this package, or the name of the file that holds it.
        endpoint: where the driver can be reached; ``None`` if it does not listen.
        exchange: whether tasks exchange facts over the channel, if they can reach it.
        silence: number of seconds after which a driver that does not answer counts as lost.
        warmth: what the job asks of warm processes.
        driver_host: the driver's address.
        gpu: name of the GPU resource; ``None`` if the run uses no GPUs.
        ports: number of ports that a task reserves.
        packages: modules besides torch. A task reports the versions of torch and of these modules.
        chunk: size of one piece of a return value, in bytes.
        in_place: whether tasks run in the driver's own current directory.
        patience: number of seconds within which all nodes of a failed run end.
        seal: the key from which the nodes' secrets are made; see :mod:`distributor.channel.proof`.
        key: authenticates the rows that one task sends to another; ``None`` if rows must not travel between executors.
    """

    job_id: str
    job: bytes
    parts: dict[str, str]
    package: bytes | str
    endpoint: Endpoint | None
    exchange: bool
    silence: float
    warmth: Warmth | None
    driver_host: str
    gpu: str | None
    ports: int
    packages: list[str]
    chunk: int
    in_place: bool
    patience: float
    seal: bytes
    key: bytes | None
