"""The process of a rank, from the forkserver to the end of one cell after another."""
