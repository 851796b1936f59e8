"""Values that cross process boundaries. Runs everywhere; standard library only, imports nothing else of the package."""
