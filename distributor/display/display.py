"""The entry point for what a run shows: the ranks' output (also in files), notes, warnings and the live view."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from distributor.display.console import Console
from distributor.display.logs import Logs
from distributor.display.snapshot import Snapshot
from distributor.display.view import View
from distributor.text import notices
from distributor.values.options import Output

_log = notices.logger

#: Seconds to wait for a view that hangs.
_PATIENCE = 2.0

#: Seconds to wait until the status is erased.
_REDRAWN = 0.5


class Display:
    """Shows one run, from :meth:`open` to :meth:`close`. ``look`` tells its state, and whether its end is awaited."""

    def __init__(
        self,
        logs: Logs,
        view: View | None = None,
        *,
        announce: bool = False,
        look: Callable[[], tuple[Snapshot, bool]],
    ) -> None:
        self.logs = logs
        self._view = view
        self._announce = announce
        self._snapshot: Callable[[], tuple[Snapshot, bool]] | None = look
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._shown_end = False

    @property
    def announces(self) -> bool:
        """Whether a line must report the failure of a run whose result no caller awaits."""
        return self._view is None or self._view.announces

    def open(self, notes: Sequence[str] = ()) -> None:
        """Print ``notes``, show the view, and show warnings from now on."""
        notices.show_on(self.logs.note)
        for note in notes:
            self.logs.note(note)
        self.look()

    def follow(self) -> None:
        """Keep the view up to date, in a thread, until the display is closed."""
        if self._view is not None:
            with suppress(RuntimeError):  # no further thread can be started: the run goes on without a live view
                threading.Thread(target=self._follow, args=(self._view,), name="distributor-view", daemon=True).start()

    def announce(self, text: str) -> None:
        """Show a line that says where the ranks run, unless the view shows that."""
        if self._announce:
            self.logs.note(text)

    def show_again(self, snapshot: Snapshot) -> bool:
        """Show the view in one more place. ``False`` if it cannot, or has already shown the end of the run."""
        with self._looking:
            return self._view is not None and not self._shown_end and self._view.show_again(snapshot)

    def look(self) -> None:
        """Update the view, unless another thread hangs while it does so."""
        if self._view is None or not self._looking.acquire(timeout=_PATIENCE):
            return
        try:
            if self._snapshot is not None and not self._shown_end:
                snapshot, awaited = self._snapshot()
                self._shown_end = snapshot.ended
                shown = self._view.show(snapshot, awaited)
                for note in shown.notes:
                    self.logs.note(note)
                self.logs.footer(shown.footer)
        except Exception as error:  # a missing or broken display must not end the run
            _log.debug("cannot show the run: %s", error)
        finally:
            self._looking.release()

    def leave(self) -> None:
        """Let a caller who no longer waits write where the status was."""
        if self.logs.has_footer:
            self.look()
            self.logs.await_footer(_REDRAWN)

    def close(self) -> None:
        """Show the remaining output, and nothing after it."""
        self._closed.set()
        self._snapshot = None  # it refers to the run's handle, which Python must be able to free
        notices.leave(self.logs.note)
        self.logs.close()
        if incomplete := self.logs.incomplete:
            _log.warning("the logs in %s", incomplete)

    def _follow(self, view: View) -> None:
        while not self._closed.wait(view.interval):
            self.look()


def make_logs(host_of: Callable[[int], str], world_size: int, output: Output, folder: Path | None = None) -> Logs:
    """Return the receiver of the ranks' output, which also writes it to files in ``folder``, if given."""
    console = Console(
        host_of,
        ranks=output.log_ranks,
        fold=output.fold_logs,
        world_size=world_size,
        prefix=output.log_prefix,
        escapes=output.log_escapes,
    )
    return Logs(console, folder)
