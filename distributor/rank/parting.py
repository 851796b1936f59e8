"""Keep a rank alive after its return until the other ranks have returned too, for a few seconds at most.

``init_process_group`` returns on a rank as soon as that rank is connected to all others. Another rank may need a moment
longer, and fails if the first rank's sockets close meanwhile. A function that only calls ``init_process_group`` would
therefore fail by chance.

With ``TORCH_DIST_INIT_BARRIER``, torch itself waits for all ranks at the end of ``init_process_group``, so that none of
them fails because another ends early. But then ``new_group`` also waits for ranks that are not in the new group. With
this module, each rank instead waits for the others after its own return, for a limited time.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

#: Maximum number of seconds that a rank waits for the others.
PATIENCE = 5.0

#: Keys in torch's store: the number of ranks that have returned, and a flag that is set once all ranks have returned.
_RETURNED_KEY = "distributor/returned"
_ALL_RETURNED_KEY = "distributor/all_returned"


def await_others() -> None:
    """Wait until all ranks of the default process group have returned, or until :data:`PATIENCE` seconds have passed.

    If there is no process group, return at once. Only one thread at a time can use the group's store. If another thread
    is using the store, this function first waits for that thread, which may take longer than :data:`PATIENCE` seconds.
    The caller must therefore set a time limit of its own.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return
    with suppress(Exception):  # the store has ended with its rank, or the others are still training
        store, ranks = distributed._get_default_store(), distributed.get_world_size()
        if store.add(_RETURNED_KEY, 1) == ranks:
            store.set(_ALL_RETURNED_KEY, "")
        store.wait([_ALL_RETURNED_KEY], timedelta(seconds=PATIENCE))
