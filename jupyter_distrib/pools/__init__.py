"""The kinds of pools, from which ranks come: one file or folder for each kind."""
