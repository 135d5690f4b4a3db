"""Training frameworks inside a cell: they must find the ranks, share the work, and leave a rank fit for the next cell."""
