"""Where ranks come from: one file or folder for each kind of pool."""
