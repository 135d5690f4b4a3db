"""The notebook's interface: the magics, the decorator, the live view, the status."""
