"""Where warnings, and lines that are none, are shown."""

from __future__ import annotations

import logging
import threading

import pytest

from distributor.text import notices


def without_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the user has not configured logging: pytest adds handlers before each test."""
    monkeypatch.setattr(notices.logger, "handlers", [notices._handler])
    monkeypatch.setattr(notices.logger, "propagate", False)


def test_a_warning_goes_to_stderr_with_a_prefix_on_each_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_handlers(monkeypatch)
    notices.logger.warning("one\n%s", "two")
    assert capsys.readouterr().err == "[distributor] one\n[distributor] two\n"


def test_the_newest_display_shows_a_warning_in_place_of_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_handlers(monkeypatch)
    first, second = list[str](), list[str]()
    notices.show_on(first.append)
    notices.show_on(second.append)
    notices.logger.warning("both are shown")
    notices.leave(second.append)
    notices.logger.warning("one is shown")
    notices.leave(first.append)
    assert (first, second, capsys.readouterr().err) == (["one is shown"], ["both are shown"], "")


def test_a_user_who_has_configured_logging_gets_it_there_only(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    notices.logger.warning("handled")
    assert (capsys.readouterr().err, caplog.messages) == ("", ["handled"])


@pytest.mark.parametrize(
    ("level", "handled", "shown", "logged"),
    [
        (None, False, "[distributor] begins at step 0\n", 0),  # nobody has configured logging
        (logging.INFO, False, "[distributor] begins at step 0\n", 0),
        (logging.WARNING, True, "", 0),
        (logging.INFO, True, "", 1),
    ],
)
def test_a_line_is_shown_unless_logging_is_configured(
    level: int | None,
    handled: bool,
    shown: str,
    logged: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    monkeypatch.setattr(notices.logger, "propagate", False)  # pytest's own handlers
    monkeypatch.setattr(notices.logger, "handlers", [notices._handler, *[handler] * handled])
    monkeypatch.setattr(notices.logger, "level", level or logging.NOTSET)
    notices.logger.manager._clear_cache()
    notices.inform("begins at step 0")
    notices.logger.manager._clear_cache()
    assert capsys.readouterr().err == shown
    assert len(records) == logged


def test_nobody_waits_for_a_handler_that_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that writes to a full pipe."""
    goes_on, begun = threading.Event(), threading.Event()

    def emit(record: logging.LogRecord) -> None:
        begun.set()
        goes_on.wait()

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    monkeypatch.setattr(notices.logger, "handlers", [notices._handler, handler])
    for number in range(3000):
        notices.soon(notices.warn, f"warning {number}")
    assert begun.wait(60.0)
    goes_on.set()
    notices.flush(60.0)
    assert caplog.messages == [f"warning {number}" for number in range(1000)], "others are left out"
