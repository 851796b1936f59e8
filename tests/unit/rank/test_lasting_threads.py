"""Which threads a rank names that waits for them at its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from distributor.metrics import rank as reports
from distributor.rank import lasting_threads


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    texts: list[str] = []
    monkeypatch.setattr(reports, "warn", texts.append)
    yield texts


def test_a_thread_is_named_with_its_stack_unless_it_is_a_daemon(warnings: list[str]) -> None:
    ended, running = threading.Event(), threading.Barrier(3)

    def prefetch() -> None:
        running.wait()
        ended.wait()

    threads = [threading.Thread(target=prefetch, name=name, daemon=name == "daemon") for name in ("loader", "daemon")]
    for thread in threads:
        thread.start()
    running.wait()
    try:
        lasting_threads.warn()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    (text,) = (text for text in warnings if "'loader'" in text or "'daemon'" in text)
    assert "its thread 'loader' has not" in text
    assert "in prefetch" in text
    assert "threading.py" not in text
