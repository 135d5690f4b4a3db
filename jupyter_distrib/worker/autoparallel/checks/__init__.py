"""Checks that a cell has trained as intended."""
