"""Ranks without processes: they run one after another in the kernel."""
