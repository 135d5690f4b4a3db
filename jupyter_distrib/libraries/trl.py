"""The facts about TRL, which trains with the Trainer of transformers."""

from __future__ import annotations

from jupyter_distrib.libraries.library import Library

TRL = Library(modules=("trl",), extra="trl")
