"""The addresses of the documentation's pages. Standard library only."""

from __future__ import annotations

SITE = "https://jupyter-distrib.readthedocs.io/en/latest/"


def page(name: str, section: str = "") -> str:
    """Return the address of a page of docs/.

    Args:
        name: The file's name without `.md`.
        section: The anchor of a heading in it: `poolerror`.
    """
    return f"{SITE}{name}.html" + (f"#{section}" if section else "")
