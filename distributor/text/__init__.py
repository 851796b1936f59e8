"""Makes texts for users. This code runs in all processes of a run, and imports nothing else of this package."""
