"""The link to JupyterLab's sidebar: what it shows of this kernel, and what it asks for."""
