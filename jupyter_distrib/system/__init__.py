"""Processes, paths and the event loop: nothing in this folder knows about cells. Any process; standard library only."""
