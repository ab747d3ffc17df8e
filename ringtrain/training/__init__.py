"""The training loop, and what happens in it."""
