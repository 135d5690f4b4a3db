"""The runs of this notebook: one execution of a cell each, from its start to its values."""
