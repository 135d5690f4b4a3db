"""Processes, paths, the event loop: nothing here knows cells. Any process; standard library only."""
