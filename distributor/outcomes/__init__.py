"""Turns the results of a run into values or one exception.

Runs on the driver; pure, except that ``advice`` reads the driver's files. May import ``shipping``.
"""
