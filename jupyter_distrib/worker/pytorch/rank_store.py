"""The store through which this rank meets the others of its worker group. Runs in the rank's main thread.

The agent binds the store's socket (loopback, any port) and hands it to rank 0, so no port is ever chosen twice. Every
group of every run gets its own prefix in the store: a second group under the same keys would meet the addresses of the
first (measured with torch 2.13: it hangs).

Through the store ranks also leave one another messages that use no process group (`StoreBoard`, in any thread), and
ranks on several nodes compare their clocks:

    rank 3   asks, at its time 10.0000 ---> rank 0 answers with its time 712.3004 ---> rank 3   reads it, at 10.0006

The answer came from the middle of the round trip, so rank 3 is 702.3001 s behind; the shortest of some trips counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from jupyter_distrib.system import network_interfaces, open_files
from jupyter_distrib.worker.pytorch import private

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)
_FILES_OF_CLIENT, _FILES_OF_SERVER = 4, 10
"""Files that torch opens for a store: sockets, and for its server libuv's loop and the first clients."""
_ARRIVED = "arrived"
_ARRIVAL_S, _LOOK_S = 5.0, 0.01


class RankStore:
    """The store of a worker group, as one rank sees it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.apart = False
        """Whether this rank is, or is about to be, disconnected from the other ranks and the store in this run."""
        self.runs = 0
        """Number of runs that this rank has started."""
        self._address = HOST, 0
        self._client: Any = None
        self._timeout = TIMEOUT
        self._served: Any = None
        """The store, in the rank that serves it. It is opened early: a rank that waits for an answer of the store can
        be stopped, a rank that waits for the opening cannot."""
        self._run, self._groups, self._arrived = "", 0, False
        self._board: StoreBoard | None = None
        self._board_before: StoreBoard | None = None
        """The previous run's board: once this rank has ended the next run, all ranks have ended that one."""

    def move(self, host: str, port: int, listen_fd: int) -> None:
        """Switch to the store at another address; with `listen_fd`, serve it there."""
        self._client, self._address, self.apart = None, (host, port), False
        self._board = self._board_before = None
        self._served = None  # first, since the next store may need its files
        self._served = None if listen_fd < 0 else self._connect(listen_fd)

    def begin(self, run: str) -> None:
        self._run, self._groups, self._arrived, self.apart = run, 0, False, False
        self._board, self._board_before = None, self._board
        self.runs += 1

    def arrived(self) -> None:
        """See `Groups.arrived`. Each rank has one key, so that nothing is left behind."""
        if self._groups or self._board is not None:
            self._client.set(f"{_ARRIVED}/{self.rank}", self._run)
            self._arrived = True

    def wait_for_arrivals(self, until: Callable[[], bool]) -> None:
        """See `Groups.wait_for_arrivals`. Rank 0 may serve the store that others still read, and gloo may still be
        connecting them to this rank."""
        keys = [f"{_ARRIVED}/{rank}" for rank in range(self.world_size)]
        limit_s = time.monotonic() + _ARRIVAL_S
        while self._arrived and not self.apart and not until() and time.monotonic() < limit_s:
            with suppress(RuntimeError):
                if self._client.check(keys) and all(self._client.get(key).decode() == self._run for key in keys):
                    return
            time.sleep(_LOOK_S)

    def limit(self, timeout: timedelta) -> None:
        """Set the timeout for waiting for other ranks."""
        self._timeout = timeout
        if self._client is not None:
            self._client.set_timeout(timeout)

    def environment(self) -> dict[str, str]:
        """Return MASTER_ADDR and MASTER_PORT with the reserved port next to the store's, for programs started by a cell
        that serve a store themselves."""
        host, port = self._address
        return {"MASTER_ADDR": host, "MASTER_PORT": str(port + 1)}

    def of_next_group(self) -> Any:
        """Return the store under a prefix that no earlier group has used."""
        if self._client is None:
            self._client = self._served or self._connect()
        self._groups += 1
        return private.PrefixStore(f"{self._run}/{self._groups}", self._client)

    def exchange(self, text: str) -> tuple[str, ...]:
        """Exchange texts through the store, which stays open for as long as there are ranks; see `Groups.exchange`."""
        store = self.of_next_group()
        store.set(f"{self.rank}", text)
        return tuple(store.get(f"{rank}").decode() for rank in range(self.world_size))

    def board(self) -> StoreBoard | None:
        """Return the board for messages between the ranks of this run; None if they have never met or are disconnected,
        when torch would print a C++ stack trace for each message."""
        if self.apart:
            return None
        if self._board is None and self._client is not None:
            self._board = StoreBoard(private.PrefixStore(f"{self._run}/board", self._client))
        return self._board

    def tidy(self) -> None:
        """Between runs, delete messages that no rank will read any more."""
        before, self._board_before = self._board_before, None
        if before is not None and not self.apart:
            with suppress(RuntimeError):  # the rank that holds the store has died, and the messages with it
                before.wipe_mine()

    def _connect(self, listen_fd: int | None = None) -> Any:
        """Return the store of another rank, or with `listen_fd` one that this rank serves.

        Raises:
            OSError: This process cannot open the files that torch needs; torch would retry for minutes.
        """
        host, port = self._address
        if not port:
            raise RuntimeError(
                "this rank was replaced a moment ago and has not met the others yet: run the cell again."
            )
        if not open_files.has_room(_FILES_OF_CLIENT if listen_fd is None else _FILES_OF_SERVER):
            raise open_files.error()
        if listen_fd is None and host != HOST:
            network_interfaces.reach_first_node((host, port)).close()
        return private.TCPStore(
            host,
            port,
            self.world_size,
            is_master=listen_fd is not None,
            timeout=self._timeout,
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listen_fd,
        )


class StoreBoard:
    """Messages between the ranks of one run. The board records the keys that this rank has written, to delete them.

    Args:
        store: The `PrefixStore` of this run alone.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._mine: set[str] = set()

    def put(self, key: str, text: str) -> None:
        """Write a text without waiting for the store (a few microseconds)."""
        self._mine.add(key)
        self._store.set(key, text)

    def put_first(self, key: str, text: str) -> str:
        """Write a text unless the key has one already. Return the text of the key."""
        self._mine.add(key)
        return str(self._store.compare_set(key, "", text).decode())

    def count(self, key: str) -> int:
        """Count a call for this key. Return the number of calls by all ranks."""
        self._mine.add(key)
        return int(self._store.add(key, 1))

    def has(self, keys: Iterable[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def get(self, key: str) -> str:
        return str(self._store.get(key).decode())

    def wait(self, keys: Iterable[str], timeout_s: float) -> None:
        """Wait for these keys. Raises a RuntimeError if they do not come."""
        self._store.wait(list(keys), timedelta(seconds=timeout_s))

    def forget(self, keys: Iterable[str]) -> None:
        """Stop tracking these keys, which another rank deletes."""
        self._mine.difference_update(keys)

    def wipe(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def wipe_mine(self) -> None:
        """Delete the keys that this rank has written; called when every rank has read them."""
        self.wipe(self._mine)
        self._mine.clear()


TRIPS = 8
"""Number of round trips per clock measurement."""


def clock_offset_s(store: Any, rank: int, world_size: int, now_s: Callable[[], float] = time.monotonic) -> float:
    """Return the offset in seconds from this rank's clock to that of rank 0. Called on all ranks, with a store used for
    nothing else."""
    if rank == 0:
        for other in range(1, world_size):
            for trip in range(TRIPS):
                store.get(f"{other}/{trip}/asked")
                store.set(f"{other}/{trip}/answered", repr(now_s()))
        return 0.0
    found = []
    for trip in range(TRIPS):
        asked_s = now_s()
        store.set(f"{rank}/{trip}/asked", "")
        answer_s = float(store.get(f"{rank}/{trip}/answered").decode())
        read_s = now_s()
        found.append((read_s - asked_s, answer_s - (asked_s + read_s) / 2))
    return min(found)[1]
