"""Samples: sources, order, and input pipeline."""
