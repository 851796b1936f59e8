"""Words for people. Runs everywhere; imports nothing of the package."""
