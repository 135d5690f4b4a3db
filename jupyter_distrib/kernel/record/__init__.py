"""The record of a run: the fold of its events."""
