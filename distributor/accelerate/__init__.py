"""Accelerate: the user's configuration as environment variables of the ranks. A wing (see docs/architecture.md)."""
