"""Executes the code of a cell: on a rank, in an inline pool, or in the notebook itself, as a set-up."""
