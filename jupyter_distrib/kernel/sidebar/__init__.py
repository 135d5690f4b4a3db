"""What JupyterLab's sidebar is told of this kernel, and what it asks for."""
