"""What users see of lines that are no warnings."""

from __future__ import annotations

import logging

import pytest

from distributor.text import notices


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
