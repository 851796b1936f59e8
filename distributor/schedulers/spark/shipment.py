"""The input of every barrier task."""

from __future__ import annotations

from typing import TypedDict

from distributor.channel import task as exchange
from distributor.values.job import Warmth


class Shipment(TypedDict):
    """The input of every task: plain values, since this package is not importable in the worker.

    ``parts`` maps parts of the job that travel separately to the names of files that Spark delivers; ``package`` is
    such a name, or the zip itself. ``exchange``: whether facts go over the channel if it can be reached. ``silence``:
    number of seconds after which a driver that does not answer counts as lost. ``warmth``: what the job asks of warm
    processes. ``gpu``: name of the GPU resource or ``None``. ``ports``: number of ports that a task reserves.
    ``packages``: modules whose versions it tells, besides torch. ``chunk``: bytes of one piece of a return value.
    ``in_place``: whether tasks run in the driver's own current directory.
    ``patience``: number of seconds within which all nodes of a failed run end. ``seal`` makes the secrets of nodes; see
    :mod:`distributor.channel.proof`. ``key`` authenticates the rows that one
    task sends to another; it is ``None`` if rows must not go from one executor to another.
    """

    run_id: str
    job: bytes
    parts: dict[str, str]
    package: bytes | str
    endpoint: exchange.Endpoint | None
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
