"""The user's notebook process: Jupyter's kernel, or a script."""
