"""Divides data loaders among ranks."""
