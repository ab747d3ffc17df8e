"""The commands: what each takes, and what it does."""
