"""The store through which this rank meets the others of its worker group. Runs in the rank's main thread.

The agent binds the store's socket (loopback, any port) and hands it to rank 0, so no port is ever chosen twice. Every
group of every run gets its own prefix in the store: a second group under the same keys would meet the addresses of the
first (measured with torch 2.13: it hangs).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from jupyter_distrib.system import open_files
from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.pytorch.store_board import StoreBoard

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
        """Whether this rank is cut off from the others and from the store in this run, or will be in a moment."""
        self.runs = 0
        """The number of runs that this rank has begun."""
        self._address = HOST, 0
        self._client: Any = None
        self._timeout = TIMEOUT
        self._served: Any = None
        """The store, in the rank that serves it. It is opened early: a rank that waits for an answer of the store can
        be stopped, a rank that waits for the opening cannot."""
        self._run, self._groups, self._arrived = "", 0, False
        self._board: StoreBoard | None = None
        self._board_before: StoreBoard | None = None
        """The board of the run before: all ranks have ended that one when this rank has ended the next."""

    def move(self, host: str, port: int, listen_fd: int) -> None:
        """Use the store at another address from now on; with `listen_fd`, serve it there."""
        self._client, self._address, self.apart = None, (host, port), False
        self._board = self._board_before = None
        self._served = None  # first: its files may be those that the next one needs
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
        """Give up waiting for other ranks after this time, from now on."""
        self._timeout = timeout
        if self._client is not None:
            self._client.set_timeout(timeout)

    def environment(self) -> dict[str, str]:
        """Return variables with a free port beside the store's, for programs that a cell starts and that serve a
        store."""
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
        """Return a board for messages between the ranks of this run; None if they have never met, or are apart: torch
        would print the stack of its C++ for each message."""
        if self.apart:
            return None
        if self._board is None and self._client is not None:
            self._board = StoreBoard(private.PrefixStore(f"{self._run}/board", self._client))
        return self._board

    def tidy(self) -> None:
        """Delete, between runs, messages that no rank will read any more."""
        before, self._board_before = self._board_before, None
        if before is not None and not self.apart:
            with suppress(RuntimeError):  # the rank that holds the store has died, and the messages with it
                before.wipe_mine()

    def _connect(self, listen_fd: int | None = None) -> Any:
        """Return the store of another rank, or with `listen_fd` one that this rank serves.

        Raises:
            OSError: This process may not open the files that torch needs for it; torch would try again for minutes.
        """
        host, port = self._address
        if not port:
            raise RuntimeError(
                "this rank was replaced a moment ago and has not met the others yet: run the cell again."
            )
        if not open_files.has_room(_FILES_OF_CLIENT if listen_fd is None else _FILES_OF_SERVER):
            raise open_files.error()
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
