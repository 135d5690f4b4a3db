"""The output of a cell beside plain text: displays, reported numbers, and what comes late."""
