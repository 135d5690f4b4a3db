"""The process that looks after the ranks of one node: no torch, no user code."""
