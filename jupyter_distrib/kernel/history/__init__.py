"""The runs of this user that have ended, also in earlier kernels: saved, listed, compared. Kernel side."""
