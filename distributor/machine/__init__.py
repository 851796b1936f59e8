"""Facts of this machine: processes, network, devices. Runs everywhere; standard library, ``values`` and ``text``."""
