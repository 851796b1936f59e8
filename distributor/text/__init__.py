"""Text for users. Runs everywhere; imports nothing else of this package."""
