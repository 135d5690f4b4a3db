"""Finds out whether a rank failed only because another rank had gone. Kernel side; pure functions of a `RunRecord`.

Two facts are needed: the exception comes from torch.distributed, its backends or TensorFlow's collectives and says
that a peer has gone; and another rank did leave. The second is needed because a connection of the user's own that is
refused, to a database or a server, gives messages with the same words.
"""

from __future__ import annotations

import re

from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire import messages as m

_PEER_LOST = re.compile(
    r"connection (?:closed|reset|aborted|was likely closed|refused)|reset by peer|closed by peer|broken pipe"
    r"|connectfullmesh failed|pair closure|socket timeout|socket closed"
    r"|remote ?error|remote process exited|communicator was aborted"
    r"|recvvalue failed|sendbytes failed|recvbytes failed|failed to recv, got 0 bytes|peer (?:went away|is gone)"
    r"|dist(?:network|store)error|heartbeat monitor timed out|unexpected end of (?:stream|file) from store",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and TCPStore that mean another rank has gone."""
_TYPES = re.compile(r"torch\.distributed\.Dist\w*Error|tensorflow\.\S+Error")
"""Exceptions that only torch's backends and TensorFlow's runtime raise."""
_SOURCES = re.compile(
    r"gloo/\S+\.(?:cc|h):\d+|\bNCCL (?:error|communicator|watchdog)|\bnccl[A-Z]\w+Error|\bProcessGroup\w+"
    r"|\bTCPStore\b|\bSocketImpl\b|\bc10d\b|\b(?:recvValue|sendBytes|recvBytes|connectFullMesh) failed"
)
"""The backends in the text of a RuntimeError, which may be raised outside torch's Python code: by `work.wait()`."""
_RAISE = re.compile(r"\braise\b")
_CODE = re.compile(r"[/\\]torch[/\\]distributed[/\\]")


def is_consequence(record: RunRecord, rank: RankRecord) -> bool:
    """Return whether a rank's exception merely reports that another rank is gone."""
    if not reports_lost_peer(rank.failure):
        return False
    return any(_left_before(other, rank) for other in record.ranks.values() if other is not rank)


def reports_lost_peer(failure: m.Failure | None) -> bool:
    """Return whether an exception, or one of its causes, comes from a backend and says that a peer has gone."""
    while failure is not None:
        if _PEER_LOST.search(f"{failure.type_name}: {failure.message}") and _is_of_backend(failure):
            return True
        failure = failure.cause
    return False


def _is_of_backend(failure: m.Failure) -> bool:
    if _TYPES.fullmatch(failure.type_name):
        return True
    last = failure.frames[-1] if failure.frames else None
    if last is not None and _CODE.search(last.filename):
        return failure.type_name == "RuntimeError"
    is_users = last is not None and _RAISE.search(last.text)  # backends raise theirs from C++, in the middle of a call
    return failure.type_name == "RuntimeError" and not is_users and bool(_SOURCES.search(failure.message))


def _left_before(other: RankRecord, rank: RankRecord) -> bool:
    """Return whether a rank left the others for a reason of its own, or lost a peer earlier than `rank`."""
    if other.exit is not None or (other.finished and other.failure is None):
        return True
    if other.failure is None:
        return False
    mine, theirs = (rank.failed_at_s, rank.rank), (other.failed_at_s, other.rank)
    return not reports_lost_peer(other.failure) or theirs < mine
