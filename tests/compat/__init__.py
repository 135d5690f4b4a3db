"""The interfaces of other platforms over ours: signatures, what is returned, errors, and the import names."""
