"""Text for users. Runs everywhere; imports nothing of the package."""
