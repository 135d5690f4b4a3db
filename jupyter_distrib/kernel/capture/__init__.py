"""The capture of the values that a cell needs from the notebook."""
