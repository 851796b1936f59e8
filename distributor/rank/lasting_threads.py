"""Say which threads keep a rank alive after its function has returned."""

from __future__ import annotations

import sys
import threading
import traceback

from distributor.metrics import rank as reports
from distributor.values.checkpoints import SAVING

PATIENCE = 5.0  # seconds after the function has returned


def warn() -> None:
    """Warn of each thread for which the interpreter waits at its end, with its stack if it is the user's."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.main_thread() or thread.ident not in frames:
            continue
        if thread.name == SAVING:
            reports.warn("the training code has ended, and the run waits until its last checkpoint is written")
            continue
        calls = traceback.extract_stack(frames[thread.ident])
        stack = "".join(traceback.format_list([call for call in calls if call.filename != threading.__file__] or calls))
        reports.warn(
            f"the training code has ended, but its thread {thread.name!r} has not, and the run waits for it. End the "
            f"thread, or make it with daemon=True:\n{stack.rstrip()}"
        )
