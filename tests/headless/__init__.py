"""Programs that execute notebooks, and consoles: what a person or a program sees of distributed cells."""
