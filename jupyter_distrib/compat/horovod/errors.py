"""The exceptions that Horovod has."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagree about it, or one of them is lost."""


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks came or went. Here a changed set of ranks runs the cell anew, so that this is never raised."""


NOT_INITIALIZED = "horovod.torch is not ready on this rank: call hvd.init() first."
