"""Accelerate: the user's configuration as environment variables of the ranks. A wing: no room imports it."""
