"""The options of a cell, and where their defaults come from."""
