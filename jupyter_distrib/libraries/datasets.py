"""The facts about Datasets, which the examples for TRL use."""

from __future__ import annotations

from jupyter_distrib.libraries.library import Library

DATASETS = Library(modules=("datasets",), extra="trl")


def is_split(part: object) -> bool:
    """Return whether a stream is a share by `datasets.distributed.split_dataset_by_node`."""
    return getattr(part, "_distributed", None) is not None


def fingerprint_of(thing: object) -> object:
    """Return the fingerprint of a dataset, for which its tables need not be read; None for anything else."""
    return getattr(thing, "_fingerprint", None)
