"""Packs what is sent to executors: functions, modules, this package, folders. Runs on the driver, nodes and ranks."""
