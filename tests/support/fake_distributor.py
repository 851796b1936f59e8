"""What stands in for a distributor where only what it is asked for matters."""

from __future__ import annotations

from typing import Any


class Fake:
    """Takes note of what a distributor is asked for."""

    asked: tuple[Any, dict[str, Any]]
    ran: tuple[Any, ...]

    def __init__(self, *args: Any, **options: Any) -> None:
        Fake.asked = args, options

    def run(self, *args: Any) -> None:
        Fake.ran = ("run", *args)

    def run_module(self, *args: Any) -> None:
        Fake.ran = ("module", *args)
