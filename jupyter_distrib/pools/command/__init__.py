"""Ranks on hosts that a command reaches by its standard input and output."""
