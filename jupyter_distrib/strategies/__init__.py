"""How a model is spread over ranks: one file for each strategy. Runs in ranks; the kernel reads the options."""
