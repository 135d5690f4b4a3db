"""The kinds of pools, which provide ranks: one file or folder for each kind."""
