"""The notebook's interface: magics, the decorator, the live view, status."""
