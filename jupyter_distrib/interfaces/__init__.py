"""The interfaces that kernel and ranks share: strategies, frameworks, and the import names of stand-ins."""
