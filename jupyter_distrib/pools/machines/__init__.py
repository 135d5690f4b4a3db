"""Machines that are started by a command when a cell needs them, and ended by another one when nobody does."""
