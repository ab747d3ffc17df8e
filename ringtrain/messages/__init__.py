"""Text for users: foreign text made safe to print, errors and ranks in words."""
