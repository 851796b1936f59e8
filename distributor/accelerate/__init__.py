"""Accelerate: the user's own configuration, as variables of the ranks. A wing: no room imports it."""
