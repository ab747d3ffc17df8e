"""The compiled training step and its parts."""
