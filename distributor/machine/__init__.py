"""Facts about this machine: processes, network, devices.

This package runs on the driver and on all nodes. In addition to the standard library, it imports only ``values``,
``text`` and ``errors`` of this library and, in ``urls``, fsspec.
"""
