"""The run directory: write it, and resume from it."""
