"""Machines that one command starts when a cell needs them, and another command ends when nobody does."""
