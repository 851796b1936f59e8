"""Executes notebooks, and keeps every state of what they display. Importing it takes seconds (nbclient)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbclient
import nbformat


class Client(nbclient.NotebookClient):
    """Keeps every state of every display, of which a notebook keeps the last."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.setdefault(cell_index, []).append(self.words(msg["content"]["data"].get("text/html", "")))
        return super().process_message(msg, cell, cell_index)


def execute(cells: list[str], words: Callable[[str], str]) -> Client:
    """Executes cells, errors included; ``words`` says what is kept of the HTML of a display."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = Client(notebook, timeout=300, allow_errors=True)
    client.shown, client.words = {}, words
    client.execute()
    return client
