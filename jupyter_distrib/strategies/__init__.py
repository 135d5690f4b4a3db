"""The ways to spread a model over ranks: one file for each strategy. Runs in ranks; the kernel reads the options."""
