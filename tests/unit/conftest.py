"""Settings of the unit tests."""

from hypothesis import settings

# A busy machine must not fail a test: no deadline per example. No database: examples depend on the code alone.
settings.register_profile("unit", deadline=None, database=None, max_examples=60)
settings.load_profile("unit")
