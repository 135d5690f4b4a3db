"""Processes, paths and the event loop: no module of this folder knows cells. Any process; standard library only."""
