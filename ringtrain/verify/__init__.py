"""``ringtrain verify``: check that N processes train the same as one."""
