"""A run on the ranks of this node: what watches it, and what stops it."""
