"""Messages for users."""
