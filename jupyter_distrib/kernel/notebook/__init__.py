"""What the user types, and what is shown for it: magics, the decorator, the live view, status."""
