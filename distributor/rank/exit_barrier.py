"""Keep a rank alive after its return until the other ranks have returned too, for a few seconds at most.

``init_process_group`` returns on a rank as soon as that rank is connected to all others. Another rank may need a moment
longer, and fails if the first rank's sockets close meanwhile: a function that only calls ``init_process_group`` would
fail by chance. ``TORCH_DIST_INIT_BARRIER`` prevents this too, but makes ``new_group`` wait for ranks that are not in
the new group.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

PATIENCE = 5.0  # seconds

_RETURNED_KEY = "distributor/returned"  # the number of ranks that have returned, in torch's store
_ALL_RETURNED_KEY = "distributor/all_returned"


def await_others() -> None:
    """Wait until all ranks of the default process group have returned, for at most :data:`PATIENCE` seconds.

    The store serves one thread at a time, so another thread may delay this: the caller must set a time limit of its
    own.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return
    with suppress(Exception):  # the store has ended with its rank, or the others are still training
        store, ranks = distributed._get_default_store(), distributed.get_world_size()
        if store.add(_RETURNED_KEY, 1) == ranks:
            store.set(_ALL_RETURNED_KEY, "")
        store.wait([_ALL_RETURNED_KEY], timedelta(seconds=PATIENCE))
