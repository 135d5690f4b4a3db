"""Distributes models and their training over the ranks."""
