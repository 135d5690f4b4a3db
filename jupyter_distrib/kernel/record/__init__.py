"""What is known of a run: the fold of its events."""
