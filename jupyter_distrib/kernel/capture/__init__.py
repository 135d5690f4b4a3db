"""What a cell needs from the notebook."""
