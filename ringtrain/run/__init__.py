"""The run directory and resume."""
