"""Which GPUs a model has that a Spark task feeds. It travels into Spark's workers by value."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from distributor.errors import ResourceError
from distributor.machine import devices
from distributor.text.wording import count


def gpus_of_model(num_gpus: int, addresses: Sequence[str], drivers: Sequence[str], partition: int) -> tuple[str, ...]:
    """Return the names of GPUs for a visible-devices variable: those at the task's addresses.

    Tasks in the driver's JVM have none: they take turns with those of the ``drivers``, or of the machine.
    """
    visible = devices.parse_visible(devices.visible_devices(os.environ))
    names = devices.through_mapping(addresses or drivers, visible, socket.gethostname())
    if not addresses:
        names = devices.local_gpus(devices.rank_visibility(names, True) if drivers else os.environ)
    models = len(names) // num_gpus
    if not models:
        raise ResourceError(
            f"predict(num_gpus={num_gpus}): this task has {count(len(names), 'GPU')} "
            f"({devices.described(os.environ, devices.list_gpus())}): lower num_gpus"
        )
    first = partition % models * num_gpus
    return tuple(names[first : first + num_gpus])
