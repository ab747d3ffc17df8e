"""Guards that stop a run before damage, and name the cause."""
