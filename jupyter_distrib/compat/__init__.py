"""The interfaces of other platforms over our own: thin, with the platform's signatures and return values.

Notebooks import them by the platform's own names (`interfaces/stand_ins.py`); docs/coming-from.md has a table for each.
Kernel side, but for the functions that the ranks call.
"""
