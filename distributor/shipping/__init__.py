"""Packs what is sent to executors: functions, modules, this package, project folders.

This package runs on the driver, on nodes and in ranks.
"""
