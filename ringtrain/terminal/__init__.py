"""The output of rank 0: the lines of a run, its progress bar, and its start-up table."""
