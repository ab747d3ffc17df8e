"""Decoded samples, kept by each rank or once for each node."""
