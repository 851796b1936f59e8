"""Facts about this machine: processes, network, devices.

This package runs on the driver and on all nodes, and in part in Spark's Python workers, which may lack other packages.
In addition to the standard library, it imports only ``values``, ``text`` and ``errors`` and, in ``urls``, fsspec.
"""
