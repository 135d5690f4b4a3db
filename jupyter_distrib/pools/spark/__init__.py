"""Ranks in a Spark application of their own, through Ray on Spark."""
