"""Names that MLflow accepts."""

from __future__ import annotations

import hashlib
import re

_LONGEST = 250

_REFUSED = re.compile(r"[^\w./ -]")


class Names:
    """Gives each name one that MLflow accepts, and different names different ones."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name for the server.

        >>> names = Names()
        >>> names("val/loss"), names("loss*2"), names("../x")
        ('val/loss', 'loss_2', 'x')
        """
        if name not in self._given:
            parts = [part for part in _REFUSED.sub("_", name).split("/") if part not in ("", ".", "..")]
            clean = "/".join(parts)[:_LONGEST].rstrip("/") or "_"
            if clean in self._taken or (len(name) > _LONGEST and clean != name):
                clean = f"{clean[: _LONGEST - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
            self._taken.add(clean)
            self._given[name] = clean
        return self._given[name]
