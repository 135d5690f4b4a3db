"""A record as text, HTML, or the state of a widget. Pure functions."""
