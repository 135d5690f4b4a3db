"""Ranks on hosts that ssh reaches, in the way of `pools/command`."""
