"""The training loop and its actions."""
