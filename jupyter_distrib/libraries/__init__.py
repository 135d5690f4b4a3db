"""The facts about other libraries that cells use: one file for each, with one `Library`. In kernel and ranks; no file
imports its library, and code that needs the library runs only where it is loaded already."""
