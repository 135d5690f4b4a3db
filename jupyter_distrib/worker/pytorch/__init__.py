"""PyTorch as the framework of a rank. Runs in ranks and in the forkserver."""
