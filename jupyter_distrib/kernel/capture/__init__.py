"""The capture of what a cell needs from the notebook."""
