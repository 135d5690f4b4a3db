"""Ranks on the nodes of a Ray cluster. All code that uses Ray is in this folder."""
