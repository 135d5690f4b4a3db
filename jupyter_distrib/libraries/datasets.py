"""The facts about Datasets, which the examples for TRL use."""

from __future__ import annotations

from jupyter_distrib.libraries.library import Library

DATASETS = Library(modules=("datasets",), extra="trl")
