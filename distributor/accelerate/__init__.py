"""Accelerate: turn the user's configuration file into environment variables of the ranks.

This package is a wing, which means that no core package imports it (see docs/architecture.md).
"""
