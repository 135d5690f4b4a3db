"""Processes, paths and the event loop: nothing here knows cells. Any process; standard library only."""
