"""The environment of a cell on a rank: what it finds, and what is put back after it."""
