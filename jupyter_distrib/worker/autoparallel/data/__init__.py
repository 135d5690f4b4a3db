"""The division of data loaders among ranks."""
