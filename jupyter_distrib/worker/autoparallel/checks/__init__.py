"""The checks whether a cell has trained as intended."""
