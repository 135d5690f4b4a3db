"""Hashes large buffers with several threads: each part has a hash of its own, and the buffer's hash is the hash of
these.

Any thread. xxhash is imported when something is hashed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PART_BYTES = 16 << 20
"""Size of a part: 2 ms, so that threads have about equal work, and an interrupt is noticed."""
_MOST_THREADS = 4
"""Maximum number of threads: more do not read memory faster."""

HashPart = Callable[[int, int, Any], object]
"""Called as `hash_part(start, size, hasher)`: updates the hasher with a part of the buffer."""


def digest_of(size_bytes: int, seed: int, hash_part: HashPart) -> bytes:
    """Return the 128-bit hash of a buffer of this size.

    Args:
        size_bytes: The size of the buffer.
        seed: A secret number, which keeps others from making values with equal hashes.
        hash_part: Reads the buffer; called in several threads.

    Raises:
        OSError: `hash_part` has raised it.
    """
    make = importlib.import_module("xxhash").xxh3_128

    def digest(start: int) -> bytes:
        hasher = make(seed=seed)
        hash_part(start, min(PART_BYTES, size_bytes - start), hasher)
        return bytes(hasher.digest())

    starts = range(0, size_bytes, PART_BYTES)
    threads = min(_MOST_THREADS, len(starts), len(os.sched_getaffinity(0)))
    if threads < 2:
        return bytes(make(b"".join(map(digest, starts)), seed=seed).digest())
    pool = ThreadPoolExecutor(threads, thread_name_prefix="jupyter_distrib-hash")
    try:
        return bytes(make(b"".join(pool.map(digest, starts)), seed=seed).digest())
    finally:
        pool.shutdown(cancel_futures=True)


def digest_of_view(view: memoryview, seed: int) -> bytes:
    """Return the hash of a buffer that can be read without danger."""

    def hash_part(start: int, size_bytes: int, hasher: Any) -> None:
        with view[start : start + size_bytes] as part:
            hasher.update(part)

    return digest_of(view.nbytes, seed, hash_part)
