"""The pools, ranks and runs of one kernel."""
