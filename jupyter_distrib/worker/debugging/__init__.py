"""The debugger of a rank, and the reports on where a rank is."""
