"""The built-in strategies, one file for each. Runs in ranks; the kernel reads the options."""
