"""What rank 0 shows: the lines of a run, its progress bar, and its start-up table."""
