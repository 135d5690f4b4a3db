"""The messages between the ranks of one run that use no process group. In any thread of a rank, as torch's store."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any


class StoreBoard:
    """A part of the store. It records the keys that this rank has written, so that they can be deleted.

    Args:
        store: The `PrefixStore` of this run alone.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._mine: set[str] = set()

    def put(self, key: str, text: str) -> None:
        """Write a text without waiting for the store: a few microseconds."""
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
        """Leave the deletion of these keys to another rank."""
        self._mine.difference_update(keys)

    def wipe(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def wipe_mine(self) -> None:
        """Delete the keys that this rank has written; called when every rank has read them."""
        self.wipe(self._mine)
        self._mine.clear()
