"""Output of rank 0."""
