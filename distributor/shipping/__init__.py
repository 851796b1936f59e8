"""Packs what is sent to executors: functions, modules, this package, project folders.

Runs on the driver, on nodes and in ranks.
"""
