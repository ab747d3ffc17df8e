"""Samples: which make a global batch, where they come from, and how they reach the step."""
