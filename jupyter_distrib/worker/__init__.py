"""The process that is one rank."""
