"""Does the run move? A thread of each rank, the hub through which the ranks tell each other, a process outside."""
