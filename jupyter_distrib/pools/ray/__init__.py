"""Ranks on the nodes of a Ray cluster. All that knows Ray is here."""
