"""The output of a cell besides plain text: displays, reported numbers, and late output."""
