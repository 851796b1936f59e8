"""Packs what is sent to executors: functions, modules, this package, project folders.

This package's code runs on the driver, on nodes and in ranks.
"""
