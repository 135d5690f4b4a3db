"""The link to JupyterLab's sidebar: its view of this kernel, and its requests."""
