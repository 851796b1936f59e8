"""Facts about this machine: processes, network, devices.

Runs everywhere; imports only the standard library, ``values``, ``text`` and ``errors``.
"""
