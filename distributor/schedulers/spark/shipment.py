"""The input of every barrier task."""

from __future__ import annotations

from typing import TypedDict

from distributor.channel.lines import Endpoint
from distributor.values.job import Warmth


class Shipment(TypedDict):
    """The input of every barrier task: plain values, since a task's Python worker cannot import this package.

    Attributes:
        job_id: identifier of the job.
        job: the pickled job, without its large parts (see ``parts``).
        parts: large parts of the job, such as the function, which Spark delivers as separate files. The keys are the
            names of the parts, and the values are the names of their files.
        package: the library itself (``distributor``) as a zip, or the zip's file name if Spark delivers it separately.
        endpoint: where the driver can be reached; ``None`` if it does not listen.
        exchange: whether tasks exchange their facts (address, GPUs, ...) through the driver, if they can reach it.
            Otherwise, they use Spark's ``allGather``.
        silence: number of seconds after which a driver that does not answer counts as lost.
        warmth: the job's requirements for a warm process (it imports torch in advance); ``None`` if the job uses none.
        driver_host: the driver's address.
        gpu: Spark's name of the GPU resource; ``None`` if the run uses no GPUs.
        most_tasks: maximum number of the job's tasks on one executor; ``None`` for any number.
        ports: number of ports that a task reserves for the run's launch path.
        packages: modules besides torch. A task reports the versions of torch and of these modules.
        chunk: size of one piece of a return value, in bytes.
        in_place: whether tasks run in the driver's own current directory.
        patience: number of seconds within which all nodes of a failed run end.
        seal: the key from which a task makes the secret of its node. With this secret, the node's processes prove to
            the driver which node they belong to; see :mod:`distributor.channel.proof`.
        key: the key with which a task of a failed run signs its report if another task must deliver the report to the
            driver; see :mod:`~distributor.schedulers.spark.holder`. If the session requests encryption, the key is
            ``None``, and tasks send each other no reports, because connections between tasks are not encrypted.
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
    most_tasks: int | None
    ports: int
    packages: list[str]
    chunk: int
    in_place: bool
    patience: float
    seal: bytes
    key: bytes | None
