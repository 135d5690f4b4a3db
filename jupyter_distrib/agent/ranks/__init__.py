"""The ranks of this node as processes: their start, their output and their end."""
