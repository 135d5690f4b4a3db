"""The views of a record: text, HTML, and the state of a widget. Pure functions."""
