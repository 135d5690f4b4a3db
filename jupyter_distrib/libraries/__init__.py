"""The facts about other libraries that cells use: one `Library` for each, in `known.py` or in a file of its own. In
kernel and ranks; no file imports its library, and code that needs the library runs only where it is loaded already."""
