"""The error of a run that was cancelled before it began."""

from __future__ import annotations

from concurrent.futures import CancelledError

from jupyter_distrib.errors import DistributedError


class RunCancelled(DistributedError, CancelledError):
    """A run was cancelled while it was queued, so no rank has executed any of it. `except Exception` catches it,
    as it does the error of a cancelled future."""


def before_it_began(label: str) -> RunCancelled:
    """Return the error for a run with this label."""
    return RunCancelled(f"{label} was cancelled before it began, so there is no result: submit it again to have one.")
