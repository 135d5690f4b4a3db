"""PyTorch in a rank: the one framework that ranks compute with today. Runs in ranks and in the forkserver."""
