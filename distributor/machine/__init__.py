"""Facts about this machine: processes, network, devices.

This package runs on the driver and on all nodes. It imports only the standard library, and ``values``, ``text`` and
``errors`` of this library.
"""
