"""One compiled training step and its parts."""
