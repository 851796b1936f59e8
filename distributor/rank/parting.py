"""How a rank that has returned leaves the others: not before they have all connected to it, or soon after.

``init_process_group`` returns on one rank when that one is connected with all; another may need a moment more, and
fails if this one's sockets close meanwhile. A function that calls nothing else would fail by chance. Torch's remedy is
a barrier in ``init_process_group`` (``TORCH_DIST_INIT_BARRIER``), which also makes ``new_group`` wait for ranks that
are not in the group; this one is at the end of a rank and bounded.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

#: Seconds that a rank stays for others at most.
PATIENCE = 5.0

#: How many ranks have returned, and set once all have.
_RETURNED_KEY = "distributor/returned"
_ALL_RETURNED_KEY = "distributor/all_returned"


def await_others() -> None:
    """Waits until all ranks of the default process group are about to end, for :data:`PATIENCE` at most.

    Returns at once if there is no such group. May block for longer if another thread is busy with the group's store:
    the caller sets the bound.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return
    with suppress(Exception):  # the store has gone with the rank that made it, or the others train on
        store, ranks = distributed._get_default_store(), distributed.get_world_size()
        if store.add(_RETURNED_KEY, 1) == ranks:
            store.set(_ALL_RETURNED_KEY, "")
        store.wait([_ALL_RETURNED_KEY], timedelta(seconds=PATIENCE))
