"""Experiment trackers: they get what a run has logged, and training never waits for them."""
