"""Experiment trackers in a real kernel, with the real libraries: what they record of a run, and that none harms it."""
