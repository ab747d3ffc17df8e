"""What a user reads: text of others made safe to show, errors in words, ranks in words."""
