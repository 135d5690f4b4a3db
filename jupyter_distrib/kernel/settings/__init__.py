"""The options of a cell, and the settings that give their defaults."""
