"""Makes the end event of a cell on one rank, in the thread that executed the cell."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.interfaces import framework, identity
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker import failure

REPORTED_BYTES = 1_000_000
"""Size in bytes from which the memory of a kept value is reported."""


def outcome(
    command: m.Execute,
    rank: int,
    namespace: dict[str, object],
    value: object,
    error: BaseException | None,
    *,
    began_at_s: float,
    stopped: Callable[[BaseException], bool],
    sequence: int = -1,
    times: m.PhaseTimes | None = None,
    peak_bytes: int | None = None,
) -> tuple[m.Returned | m.Failed | m.Interrupted, list[int]]:
    """Keep the values that `--keep` names. Return the end event and its descriptors, which the caller closes.

    `stopped` returns whether an exception was caused by stopping the run; for `sequence`, `times` and
    `peak_bytes` see `Returned`.
    """
    run, by_value = command.run, command.setting.by_value
    left = isinstance(error, SystemExit) and error.code in (None, 0)
    if error is None or left:
        parcel, fd = None, None
        if value is not None:
            parcel, fd = _parcel(value, by_value=by_value, run=run)
        returned = m.Returned(
            run=run,
            rank=rank,
            value=parcel,
            kept=_keep(command, namespace),
            began_at_s=began_at_s,
            at_s=time.monotonic(),
            exited_early=left and not command.cell.script,
            sequence=sequence,
            times=times,
            peak_tensor_bytes=peak_bytes,
        )
        return returned, [] if fd is None else [fd]
    if stopped(error):
        frames = failure.frames_when_stopped(error)
        kept = _keep(command, namespace) if identity.cell.begun else None
        return m.Interrupted(run=run, rank=rank, frames=frames, at_s=time.monotonic(), kept=kept), []
    at_s = time.monotonic()
    groupless = failure.groupless(command.setting.strategy, everyone=identity.everyone(command))
    described = failure.describe(error, run=run, by_value=by_value, absent=command.cell.absent, groupless=groupless)
    return m.Failed(run=run, rank=rank, failure=described, at_s=at_s), []


def _keep(command: m.Execute, namespace: dict[str, object]) -> m.KeptNames | None:
    kept = {name: namespace[name] for name in command.setting.keep if name in namespace}
    if not kept:
        return None
    payload.kept_values.update({f"{command.run}/{name}": value for name, value in kept.items()})
    shards = getattr(identity.cell.strategy, "shards", False)
    return m.KeptNames(
        types={name: type(value).__name__ for name, value in kept.items()},
        sizes=_sizes(kept),
        sharded=tuple(name for name, value in kept.items() if shards and payload.sharded_in(value)),
    )


def _sizes(kept: dict[str, object]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in kept.items():
        with suppress(Exception):  # a class of the user may behave in any way
            assert framework.current is not None
            found[name] = framework.current.tensor_bytes(value)
    return {name: size_bytes for name, size_bytes in found.items() if size_bytes >= REPORTED_BYTES}


def _parcel(value: object, *, by_value: bool, run: str) -> tuple[m.Parcel, int | None]:
    try:
        return payload.to_parcel(payload.pack_value(value, by_value=by_value, run=run, deferred=True))
    except PayloadError as error:  # there is no memory for the value
        instead = payload.placeholder(value, str(error))
        return payload.to_parcel(payload.pack_value(instead, by_value=by_value, run=run))
