"""The values that cross boundaries. Runs everywhere; standard library only, imports nothing of the package."""
