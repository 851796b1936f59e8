"""Which threads a rank names that waits for them at its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributor.checkpoint.context import Session
from distributor.metrics import rank as reports
from distributor.rank import lasting_threads
from distributor.values.checkpoints import Checkpoints, Settings


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


def test_the_last_save_is_no_thread_of_the_training_code(warnings: list[str], tmp_path: Path) -> None:
    saved = threading.Event()
    checkpoints = Session(Settings(Checkpoints(str(tmp_path)), None, {}, True))
    checkpoints.save_later(saved.wait)  # type: ignore[arg-type]
    try:
        lasting_threads.warn()
    finally:
        saved.set()
        checkpoints.finish()
    assert [text for text in warnings if "checkpoint" in text] == [
        "the training code has ended, and the run waits until its last checkpoint is written"
    ]
