"""Chooses the view that fits the driver's output: a notebook, a terminal or something else."""

from __future__ import annotations

import sys

from distributor.display.screen import is_terminal
from distributor.display.trials import TrialsView
from distributor.display.view import View
from distributor.text import cells


def choose() -> View:
    """Return the view for this process's output."""
    if getattr(cells.shell(), "kernel", None) is not None:  # a Jupyter front end shows what this process displays
        from distributor.display.notebook import NotebookView

        return NotebookView()
    if is_terminal(sys.stderr):
        from distributor.display.terminal import TerminalView

        return TerminalView()
    from distributor.display.plain import PlainView

    return PlainView()


def choose_trials() -> TrialsView:
    """Return the view of a search for this process's output."""
    if getattr(cells.shell(), "kernel", None) is not None:
        from distributor.display.notebook import NotebookTrials

        return NotebookTrials()
    if is_terminal(sys.stderr):
        from distributor.display.terminal import TerminalTrials

        return TerminalTrials()
    from distributor.display.plain import PlainTrials

    return PlainTrials()
