"""The rendezvous and the process group of one rank. Runs in the rank's main thread, except `abort`.

Ranks meet through a store (`rank_store.py`), in which every `init_process_group` of every run has its own prefix.

Three functions of torch are wrapped in a rank: `init_process_group`, `destroy_process_group` and `new_group`. A
strategy has often made the group already when a script calls `init_process_group`; that call then finds it done.

Groups have no timeout while a cell runs that may stop in the debugger (`GroupTimeouts`): the other ranks then wait for
the user.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist

from jupyter_distrib.interfaces import identity
from jupyter_distrib.system import open_files
from jupyter_distrib.worker.debugging import debugger_channel
from jupyter_distrib.worker.pytorch import private, rank_store
from jupyter_distrib.worker.pytorch.ddp_regroup import move_to_default_group, restart_steps
from jupyter_distrib.worker.pytorch.rank_store import TIMEOUT, RankStore, StoreBoard

ABORT_S = 1.0
"""Seconds after which sockets are shut down even if NCCL has not aborted."""
GIVE_UP_S = 5.0
"""Seconds after which a rank whose groups have not been aborted is replaced. An abort waits until all of NCCL's
kernels in the GPU's queue, which holds 1024, have noticed it: up to minutes (github.com/NVIDIA/nccl/pull/1462)."""
LOOK_UP_S = 0.05
"""Seconds between two checks for a stop while the rank waits for its device."""
DRAIN_S = 0.5
"""Seconds for a GPU to finish work that needs other ranks: if they arrive, they arrive soon."""
FALLBACK = "JUPYTER_DISTRIB_BACKEND_FALLBACK"
"""Environment variable that `--backend-fallback` sets on the ranks."""
_FILES_OF_GROUP = 6
"""Files that gloo opens besides one connection per rank; if it cannot accept a connection, it aborts the process in C++
(gloo/transport/tcp/listener.cc)."""
_ON_DEVICE = ("nccl", "xccl")
_RAN_BEFORE = "jupyter_distrib: ran before"


class Rendezvous:
    """The connection of this rank to the others, and the state of the group that it shares with them."""

    ends_at_reset = False
    """Only ranks with a device may exit, and those report the end of a reset in any case."""

    def __init__(self, rank: int, world_size: int, use_device: Callable[[], None] = lambda: None) -> None:
        self.store = RankStore(rank, world_size)
        self._pid = os.getpid()
        self._use_device = use_device
        self._aborting: threading.Thread | None = None
        self.automatic = False
        """Whether a strategy created the default group and the next run can still use it."""
        self._timeouts = GroupTimeouts()
        self.asked = False
        """Whether the cell itself has called `init_process_group`."""
        self._hidden: Any = None
        """The strategy's group while a cell runs that has not requested one."""
        self._debug_level: str | None = None
        """The value of TORCH_DISTRIBUTED_DEBUG that torch has read."""
        self._made_with: str | None = None
        self.stops = 0
        """Number of runs that did not end well and whose groups were kept; equal on all ranks of a group."""
        self._stops_before = 0
        """Value of `stops` at the last call of `ensure`."""
        self._destroyed = DestroyedGroups()

    @property
    def is_of_parent(self) -> bool:
        """Return whether this process was forked by the rank: its groups are its own, by torch's own rules."""
        return self._pid != os.getpid()

    @property
    def apart(self) -> bool:
        """Return whether this rank is cut off from the others and from the store, or will be in a moment."""
        return self.store.apart

    @apart.setter
    def apart(self, apart: bool) -> None:
        self.store.apart = apart

    def reset(self, host: str, port: int, listen_fd: int) -> None:
        """Drop everything that depends on the old store. Called on all ranks after a run that did not end well
        everywhere.

        Raises:
            RuntimeError: NCCL does not abort, so that this rank has to be replaced.
        """
        self._show()
        if self.waits_on_device():  # never `destroy`, which waits for kernels that wait for other ranks
            self.abort(lambda: None)
        if self._aborting is not None:
            self._aborting.join(GIVE_UP_S)
            if self._aborting.is_alive():
                raise RuntimeError(f"NCCL did not abort the process group within {GIVE_UP_S:.0f} s.")
            self._aborting = None
        self.drop()
        self.store.move(host, port, listen_fd)

    def begin(self, run: str) -> None:
        """Prepare for a cell: it sees a group that a strategy created for an earlier cell only if it requests one."""
        self.asked = False
        self.store.begin(run)
        self.hide()
        level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "")
        if level != self._debug_level:  # torch reads it once, when it is imported
            dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # public, but not exported for checkers
            private.log_construction(on=level != "DETAIL")
            self._debug_level = level

    def arrived(self) -> None:
        self.store.arrived()

    def wait_for_arrivals(self, *, until: Callable[[], bool]) -> None:
        self.store.wait_for_arrivals(until)

    def wait_endlessly(self, *, on: bool) -> None:
        """Wait for other ranks without a limit in this cell, or no longer; see `Groups.wait_endlessly`."""
        if on or self._timeouts.endless:
            self._timeouts.begin(endless=on)
            self.store.limit(NO_LIMIT if on else TIMEOUT)

    def lift_timeouts(self) -> None:
        """Lift the timeouts of new groups in a cell that may stop in the debugger. NCCL connects at its first
        collective, and then waits with the store's."""
        self._timeouts.apply()
        if self._timeouts.endless:
            self.store.limit(NO_LIMIT)

    def timeout_s(self) -> float | None:
        return self._timeouts.limit_s()

    def limit_store(self, store: Any, timeout: timedelta) -> None:
        """Apply the timeout given to `init_process_group` to the store, unless timeouts are lifted."""
        store.set_timeout(NO_LIMIT if self._timeouts.endless else timeout)

    def drop(self) -> None:
        """Destroy the default group and its subgroups, if there are any."""
        self._show()
        self.automatic = False
        self.hold()
        if dist.is_initialized():
            _torch_destroy()
        # An interrupted init has raised the count, which torch (2.13) puts into the names of its keys.
        private.forget_group_count()

    def hold(self) -> None:
        """Keep references to the groups that are about to be destroyed, see `DestroyedGroups`."""
        self._destroyed.add(group for _, group, _ in private.known_groups())

    def environment(self) -> dict[str, str]:
        return self.store.environment()

    def exchange(self, text: str) -> tuple[str, ...]:
        return self.store.exchange(text)

    def clock_offset_s(self) -> float:
        """Return the offset in seconds from this rank's clock to that of rank 0. Called on all ranks of the worker
        group."""
        return rank_store.clock_offset_s(self.store.of_next_group(), self.store.rank, self.store.world_size)

    def board(self) -> StoreBoard | None:
        return self.store.board()

    def tidy(self) -> None:
        """Between runs, delete messages that no rank will read any more, and free unused groups."""
        self._destroyed.age()
        self.store.tidy()

    def ensure(self, backend: str) -> bool:
        """Make sure that there is a default group with this backend: the kept one if it is still usable, else a new
        one.

        Return True if kept values may differ between ranks: a run was stopped, or the group is new and some rank has
        run a cell before. Equal on all ranks, each of which writes this to the store before gloo connects them.
        """
        self._show()
        stopped, self._stops_before = self.stops != self._stops_before, self.stops
        if self.automatic and dist.is_initialized() and self._made_with == self._debug_level:
            if stopped:
                restart_steps()
            return stopped
        self.drop()
        store = self.store.of_next_group()
        if not open_files.has_room(_FILES_OF_GROUP + self.store.world_size):
            raise open_files.error()
        if self.store.runs > 1:
            store.set(_RAN_BEFORE, "")
        _torch_init(backend, store=store, rank=self.store.rank, world_size=self.store.world_size)
        self.automatic, self._made_with = True, self._debug_level
        self.lift_timeouts()
        move_to_default_group()
        connects_late = "TORCH_GLOO_LAZY_INIT" in os.environ
        return connects_late or bool(store.check([_RAN_BEFORE]))

    def hide(self) -> None:
        """Hide the default group that a strategy created; the next `ensure` restores it."""
        if self.automatic and dist.is_initialized():
            self._hidden = private.default_group()
            private.set_default_group(None)

    def _show(self) -> None:
        if self._hidden is not None:
            private.set_default_group(self._hidden)
            self._hidden = None

    def sequence(self) -> int:
        """Return the number of collectives in the default group; if ranks differ, their next collectives would not
        match. -1: no group."""
        if not dist.is_initialized():
            return -1
        if not self.automatic:
            return 0
        return private.sequence(private.default_group())

    def abort(self, then: Callable[[], None]) -> None:
        """Abort NCCL while its sockets are intact; gloo is released when they are shut down. See `Groups.abort`."""
        if not self.waits_on_device():
            return then()
        if self._aborting is None or not self._aborting.is_alive():
            log = ExitStack()
            log.enter_context(private.no_errors_of_watchdogs())
            self._aborting = _daemon(self._abort)
            _daemon(partial(_close_after, self._aborting, log))
        aborting = self._aborting

        def finish() -> None:
            aborting.join(ABORT_S)
            then()

        _daemon(finish)

    def _abort(self) -> None:
        with suppress(Exception):  # the group is gone meanwhile, or cannot be aborted: then `reset` gives the rank up
            self.hold()  # aborting makes torch forget them
            self._use_device()
            private.abort_groups()

    def waits_on_device(self) -> bool:
        """Return whether a group's collectives run on the device, so that destroying the group would wait for them."""
        return any(name in private.backends(group) for _, group, _ in private.known_groups() for name in _ON_DEVICE)

    def wait_for_device(self) -> None:
        """Wait for all work of the device, interruptibly."""

        def wait() -> None:
            self._use_device()
            torch.get_device_module(identity.device()).synchronize()

        waiting = _daemon(wait)
        while waiting.is_alive():
            waiting.join(LOOK_UP_S)

    def wait_s(self) -> float:
        return DRAIN_S if self.waits_on_device() else 0.0

    def can_stay(self) -> bool:
        """Return whether there is no group, or only the strategy's, which stays usable; too little is known of
        others. A send may be done though nobody has received it, and would be taken by the next receive."""
        if not dist.is_initialized():
            return True
        return self.automatic and not any(entry["is_p2p"] for entry in private.recorded_collectives())

    def keep(self) -> None:
        self.stops += 1


class DestroyedGroups:
    """The groups that were destroyed in this run and in the previous one.

    When Python frees a group, it releases the GIL, which the group's threads may need to end. The reducer of a
    `DistributedDataParallel` does not (torch 2.13), so it must not hold the last reference to the group.
    """

    def __init__(self) -> None:
        self._now: list[Any] = []
        self._before: list[Any] = []

    def add(self, groups: Iterable[Any]) -> None:
        self._now += groups

    def age(self) -> None:
        """Free the groups destroyed in the previous run; called after each run."""
        self._now, self._before = [], self._now


current: Rendezvous
_torch_init = dist.init_process_group
_torch_destroy = dist.destroy_process_group
_torch_new_group = dist.new_group


def install(rendezvous: Rendezvous) -> None:
    """Make torch's own entry points in this process go through `rendezvous`."""
    global current
    current = rendezvous
    private.answer_env_rendezvous(_rendezvous_env)
    private.replace_batches(_batch)
    private.replace_entry_points(
        {
            "init_process_group": _init_process_group,
            "destroy_process_group": _destroy_process_group,
            "new_group": _new_group,
            "breakpoint": _breakpoint,
        }
    )


def _close_after(thread: threading.Thread, stack: ExitStack) -> None:
    thread.join()
    stack.close()


def _daemon(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, name="jupyter_distrib-groups", daemon=True)
    thread.start()
    return thread


def default_backend(device: torch.device) -> str:
    """Return the backend of a strategy's group, with which object collectives work on GPU ranks, too."""
    return {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(device.type, "gloo")


def _rendezvous_env(url: str, timeout: timedelta = timedelta(minutes=30), **others: object) -> Any:
    """Answer `env://` with RANK and WORLD_SIZE as set, and our store in place of MASTER_ADDR and MASTER_PORT."""
    if current.is_of_parent:
        return (yield from private.torch_env_rendezvous(url, timeout, **others))
    given = dict(parse_qsl(urlparse(url).query))  # torch puts its arguments there
    rank = int(given.get("rank", os.environ.get("RANK", current.store.rank)))
    world_size = int(given.get("world_size", os.environ.get("WORLD_SIZE", current.store.world_size)))
    check_place(rank, world_size)
    store = current.store.of_next_group()
    current.limit_store(store, timeout)
    if 1 < world_size < current.store.world_size and store.add(f"jupyter_distrib: rank {rank}", 1) > 1:
        raise ValueError(
            f"init_process_group(rank={rank}, world_size={world_size}): another rank has this number in the group. "
            f"Give each rank its own, and make several groups with torch.distributed.new_group."
        )
    yield store, rank, world_size
    raise RuntimeError("env:// rendezvous happens once per init_process_group")


@wraps(_torch_init)
def _init_process_group(backend: str | None = None, *args: Any, **keywords: Any) -> None:
    if current.is_of_parent:
        _torch_init(backend, *args, **keywords)
        return
    current.asked = True
    if falls_back(backend, identity.device()):
        backend = "gloo"
        keywords.pop("device_id", None)
        if current.store.rank == 0:
            warnings.warn("the ranks have no GPU: this process group uses gloo, as requested", stacklevel=2)
    if current.automatic and dist.is_initialized():
        check_backend(backend, str(dist.get_backend_config()))
        given = inspect.signature(_torch_init).bind_partial(backend, *args, **keywords).arguments
        if (given.get("rank"), given.get("world_size")) != (0, 1):  # else it is a program for a single process
            check_place(given.get("rank", -1), given.get("world_size", -1), whole=True)
        return
    current.drop()
    _torch_init(backend, *args, **keywords)
    current.lift_timeouts()
    move_to_default_group()


def falls_back(asked: str | None, device: torch.device) -> bool:
    """Return whether gloo replaces the backend requested in `init_process_group` (`--backend-fallback`)."""
    wanted = asked is not None and any(name in asked.lower() for name in _ON_DEVICE)
    return wanted and device.type == "cpu" and os.environ.get(FALLBACK) == "1"


def check_backend(asked: str | None, have: str) -> None:
    """Refuse a request for a backend that the group does not have. A plain `nccl` matches the backend of any device.

    Args:
        asked: The script's argument of `init_process_group`: `gloo`, `cpu:gloo,cuda:nccl`, in any case; None is any.
        have: The result of `torch.distributed.get_backend_config`: always pairs, such as `cpu:gloo,cuda:gloo`.
    """
    if asked is None or asked.lower() == dist.Backend.UNDEFINED:
        return
    pairs = have.lower().split(",")
    backends = {pair.partition(":")[2] for pair in pairs}
    if all(part in (pairs if ":" in part else backends) for part in asked.lower().split(",")):
        return
    made = backends.pop() if len(backends) == 1 else have
    raise ValueError(
        f"init_process_group({asked!r}): the cell's strategy has already made the process group, with {made}. "
        f"Leave out the call, ask for {made!r}, or run the cell with --strategy none."
    )


def check_place(rank: int, world_size: int, *, whole: bool = False) -> None:
    """Refuse a group that this rank cannot be in as asked, which would wait for ranks that there are not.

    Args:
        rank: This rank's number in the group; -1 for its number in the run.
        world_size: The number of ranks in the group; -1 for all of the run. A group of some of them is fine.
        whole: Whether the group has all ranks of the run.
    """
    mine = current.store
    place = rank if rank >= 0 else mine.rank
    size = world_size if world_size >= 0 else mine.world_size
    if (place, size) == (mine.rank, mine.world_size) or (not whole and place < size < mine.world_size):
        return
    cure = f", or start {size} ranks" if size > mine.world_size else ""
    raise ValueError(
        f"init_process_group(rank={place}, world_size={size}): this is rank {mine.rank} of {mine.world_size}. Leave "
        f"out both arguments, and RANK and WORLD_SIZE in os.environ as they are{cure}."
    )


@wraps(_torch_destroy)
def _destroy_process_group(group: Any = None) -> None:
    if current.is_of_parent:
        _torch_destroy(group)
        return
    if dist.is_initialized():
        current.automatic = False
    current.hold()
    on_device = current.waits_on_device()
    # torch's own waits, with a lock that an abort needs, for collectives that others may never enter.
    if sys.exception() is not None and (on_device or not dist.is_initialized()):  # as in the `finally` of a script
        return current.abort(lambda: None)
    if on_device:
        current.wait_for_device()
    _torch_destroy(group)


@wraps(_torch_new_group)
def _new_group(*args: Any, **keywords: Any) -> Any:
    if current.is_of_parent:
        return _torch_new_group(*args, **keywords)
    if dist.is_initialized():
        current.automatic = False
    group = _torch_new_group(*args, **keywords)
    current.lift_timeouts()
    return group


@contextmanager
def _batch(group: Any = None, device: torch.device | None = None, async_ops: bool = False) -> Iterator[Any]:
    """Collect sends and receives that run together, as `batch_isend_irecv` does. An exception also ends the batch:
    torch (2.13) leaves it open, and NCCL then holds back whatever this thread asks for later."""
    try:
        with private.torch_batch(group, device, async_ops) as batch:
            yield batch
    except BaseException:
        private.end_batch(group, device)
        raise


def _breakpoint(rank: int = 0, *_: object, **__: object) -> None:
    """Stop one rank in the debugger, as `torch.distributed.breakpoint` does; the others continue to the next
    collective."""
    if dist.get_rank() == rank:
        debugger_channel.stop(sys._getframe(1))  # noqa: SLF001 - the caller's frame, as pdb itself gets it


NO_LIMIT = timedelta(days=30)


class GroupTimeouts:
    """The timeouts of this rank's groups."""

    def __init__(self) -> None:
        self.endless = False
        """Whether collectives wait without a limit during this cell."""
        self._before: dict[tuple[str, str], timedelta] = {}
        """The original timeouts that were lifted, by the names of group and backend."""

    def begin(self, *, endless: bool) -> None:
        """Prepare the existing groups for a cell."""
        if self._before:
            for key, backend in private.backends_of_groups().items():
                if (timeout := self._before.get(key)) is not None:
                    private.set_timeout(backend, timeout)
            self._before.clear()
        self.endless = endless
        self.apply()

    def apply(self) -> None:
        """Lift the timeouts of new groups, if this cell needs that."""
        for key, backend in private.backends_of_groups().items() if self.endless else ():
            timeout = private.timeout(backend)
            if timeout is not None and timeout != NO_LIMIT:
                self._before[key] = timeout
                private.set_timeout(backend, NO_LIMIT)

    def limit_s(self) -> float | None:
        """Return the shortest timeout of a collective in seconds; None without a group."""
        limits = [timeout for each in private.backends_of_groups().values() if (timeout := private.timeout(each))]
        return min(limits).total_seconds() if limits else None
