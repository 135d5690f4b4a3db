"""Ranks in an allocation of Slurm: the one that the notebook is in, or one of their own."""
