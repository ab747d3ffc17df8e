"""Hang detection: a thread per rank, a hub that connects them, and an outside process."""
