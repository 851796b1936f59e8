"""Packs what is sent to executors: functions, modules, the library itself (``distributor``), project folders.

The code in this folder runs on the driver, on nodes and in ranks.
"""
