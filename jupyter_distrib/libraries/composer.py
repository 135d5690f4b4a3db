"""The facts about Composer, which divides its data itself."""

from __future__ import annotations

from jupyter_distrib.libraries.library import Library

COMPOSER = Library(modules=("composer",), divides_data=True)
