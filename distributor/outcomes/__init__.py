"""Turns the results of a run into values or one exception.

This package runs on the driver. It is pure, except that ``advice`` reads the driver's files. It may import
``shipping``.
"""
