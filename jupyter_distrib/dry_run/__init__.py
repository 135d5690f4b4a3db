"""Dry runs: the part of one rank in a cell, played without values, GPU and other ranks, in a process of its own."""
