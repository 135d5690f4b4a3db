"""The debugger of a rank, and the answers to those who ask where a rank is."""
