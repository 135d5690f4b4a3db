"""The analysis of a record: failures, metrics, shares of time, traces. Pure functions."""
