"""Remembers the large buffers that were sent to the ranks, so that an unchanged buffer is not sent again.

    a buffer --> one of this size was sent? --> its hash equals that of the one that was sent? --yes--> the memory
    that holds it
                       no, or no                                                  --no---> new memory, which is kept

Sent buffers lie in sealed anonymous memory, which nobody can change and no other user can open; the ranks map it
copy-on-write. It is freed when this process ends, however that happens. A hash is always computed from the buffer as it
is when the cell is sent, and from the sealed memory, never from a buffer that may have changed since it was written.

Kernel side, any thread. Nothing happens here for buffers below `LARGE_BYTES`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jupyter_distrib.serialization import device_memory, shared_memory
from jupyter_distrib.serialization.content_hash import digest_of, digest_of_view
from jupyter_distrib.serialization.file_memory import FileMemory, address_of, digest_of_file_memory
from jupyter_distrib.system.control_groups import free_memory_bytes
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors

LARGE_BYTES = 1_000_000
"""Size from which a buffer is remembered."""
MOST_SEGMENTS = 64
"""Maximum number of segments to keep: each takes a file descriptor here, and on a node of another machine."""
AHEAD_BYTES = 8 << 20
"""Size from which a segment is hashed in a thread, before a cell waits for the hashes."""
_CHECK_FROM_BYTES = 64 << 20
"""Size from which it is worth 0.1 ms to check the amount of free memory."""
_SHARE = 4
_SPOTS, _SPOT_BYTES = 64, 64
"""Number and size of the places that are compared before a whole buffer is hashed."""


def own_limit_bytes(held_bytes: int = 0) -> int:
    """Return the limit of a machine for which none is given: a quarter of /dev/shm or of the free memory, whichever is
    less; 0 where there is no anonymous memory (macOS), or no room in /dev/shm.

    Args:
        held_bytes: Size of the memory that is kept already, which counts as free.
    """
    if not hasattr(os, "memfd_create"):
        return 0
    try:
        shared = shutil.disk_usage("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        return 0
    return min(shared.total // _SHARE, shared.free, (free_memory_bytes() + held_bytes) // _SHARE)


@data_class
class Layout:
    """The places of the buffers of a parcel."""

    parcel: m.Parcel
    new: Sequence[memoryview]
    """Buffers to be written into new memory, whose descriptor comes first."""
    reused: Descriptors = NO_DESCRIPTORS
    """The memory that holds the other buffers, whose descriptors come next."""
    pieces: tuple[_Piece, ...] = ()
    """The buffers of the new memory to be remembered; empty if it is not kept."""


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A buffer in a segment."""

    start: int
    size_bytes: int
    address: int
    """The place of the buffer in this process."""
    superseded: bool = False
    """Whether something else has been sent from that place since."""
    spots: bytes = b""
    digest: bytes = b""


class ValueCache:
    """The large buffers that this kernel has sent, the last used last."""

    def __init__(self) -> None:
        self._segments: OrderedDict[str, _Segment] = OrderedDict()
        self._lock = threading.RLock()
        self._seed = secrets.randbits(64)
        self._unused: list[_Segment] = []
        """Segments to be freed when the run has ended: 512 MB take 0.05 s."""

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments.values())

    def clear(self) -> None:
        """Free everything."""
        with self._lock:
            self._shrink(0)

    def lay_out(self, parcel: m.Parcel, views: Sequence[memoryview], given_bytes: int | None) -> Layout:
        """Return where the buffers of a parcel are to lie: in new memory, or in the memory that holds them already.

        Args:
            parcel: The parcel from `payload.laid_out`.
            views: The buffers from there, which go through shared memory.
            given_bytes: The most memory that the user allows; 0 for none, None for `own_limit_bytes`.
        """
        large = [number for number, view in enumerate(views) if view.nbytes >= LARGE_BYTES]
        if not large:
            return Layout(parcel=parcel, new=views)
        with self._lock:
            limit = own_limit_bytes(self.size_bytes) if given_bytes is None else given_bytes
            if not limit or not hasattr(os, "memfd_create"):
                self._shrink(0)
                return Layout(parcel=parcel, new=views)
            try:
                return self._laid_out(replace(parcel, cache_bytes=given_bytes), views, large, limit)
            except OSError:  # this process can open no more files
                self._shrink(0)
                return Layout(parcel=parcel, new=views)

    def known(self, views: Sequence[memoryview]) -> dict[str, int]:
        """Return the ids of the segments that hold some of these buffers, with the size of those buffers."""
        sizes: dict[str, int] = {}
        with self._lock:
            for number, (name, _) in self._find(views).items():
                sizes[name] = sizes.get(name, 0) + views[number].nbytes
        return sizes

    def keep(self, layout: Layout, fd: int) -> None:
        """Remember the new memory of a layout, which is complete; `fd` is closed when it is forgotten."""
        with self._lock:
            if not layout.pieces or not shared_memory.is_sealed(fd):
                os.close(fd)
                return
            self._supersede(layout.pieces)
            self._segments[layout.parcel.segments[0]] = _Segment(fd, layout.pieces, self._seed)

    def tidy(self) -> None:
        """In a thread, free unneeded memory, and compute hashes that the next cell may need: called at the end of a
        run, which this must not slow down."""
        segments = [*self._segments.values()]  # without the lock, for which events of runs would have to wait
        large = [each for each in segments if each.size_bytes >= AHEAD_BYTES and not each.is_hashed]
        if large or self._unused:
            unused, self._unused = self._unused, []
            threading.Thread(target=_tidy, args=(unused, large), name="jupyter_distrib-hash", daemon=True).start()

    def _laid_out(self, parcel: m.Parcel, views: Sequence[memoryview], large: list[int], limit: int) -> Layout:
        with ExitStack() as given_up:
            fds = list[int]()
            given_up.callback(lambda: Descriptors(fds).close())
            layout = self._placed(parcel, views, large, limit, fds)
            given_up.pop_all()
            return layout

    def _placed(
        self, parcel: m.Parcel, views: Sequence[memoryview], large: list[int], limit: int, fds: list[int]
    ) -> Layout:
        """Return the layout; `fds` takes the descriptors of the memory that is reused."""
        found = self._find(views)
        changed = [number for number in large if number not in found]
        small = [number for number, view in enumerate(views) if view.nbytes < LARGE_BYTES]
        new, beside = (changed, small) if changed else (small, [])
        ids, places = list[str](), dict[int, tuple[int, int]]()
        pieces, total = [], 0
        if new:
            starts, total = shared_memory.offsets([views[number].nbytes for number in new])
            ids.append(secrets.token_hex(8))
            places |= {number: (0, start) for number, start in zip(new, starts, strict=True)}
            pieces = [_piece(views[number], places[number][1]) for number in changed]
        for number, (name, start) in found.items():
            if name not in ids:
                ids.append(name)
                fds.append(os.dup(self._segments[name].fd))
            places[number] = ids.index(name), start
        if beside:  # so that no memory is kept for them
            starts, _ = shared_memory.offsets([views[number].nbytes for number in beside])
            places |= {number: (len(ids), start) for number, start in zip(beside, starts, strict=True)}
            ids.append(secrets.token_hex(8))
            fds.append(shared_memory.write([views[number] for number in beside]))
        if total > limit:
            pieces = []
        elif total >= _CHECK_FROM_BYTES and total >= free_memory_bytes():
            limit, pieces = 0, []  # buffers that are sent now are kept first
        self._shrink(limit - total if pieces else limit)
        parcel = replace(
            parcel,
            segments=tuple(ids),
            places=tuple(places[number] for number in range(len(views))),
            kept=(*self._segments, *(ids[:1] if pieces else ())),
        )
        return Layout(
            parcel=parcel,
            new=[views[number] for number in new],
            reused=Descriptors(fds),
            pieces=tuple(pieces),
        )

    def _shrink(self, limit_bytes: int) -> None:
        """Forget the least recently used segments until the rest is within the limit."""
        unused, self._unused = self._unused, []
        for segment in unused:
            segment.close()
        while self._segments and (self.size_bytes > limit_bytes or len(self._segments) >= MOST_SEGMENTS):
            _, segment = self._segments.popitem(last=False)
            segment.close()

    def _supersede(self, pieces: Sequence[_Piece]) -> None:
        """Forget segments of which every buffer has changed."""
        places = {(piece.address, piece.size_bytes) for piece in pieces}
        for name, segment in [*self._segments.items()]:
            for piece in segment.pieces:
                piece.superseded |= (piece.address, piece.size_bytes) in places
            if all(piece.superseded for piece in segment.pieces):
                self._unused.append(self._segments.pop(name))

    # ---------------------------------------------------------------------------------------------------- finding

    def _find(self, views: Sequence[memoryview]) -> dict[int, tuple[str, int]]:
        """Return, for each known buffer by its number, its segment and its offset there."""
        sizes = {piece.size_bytes for segment in self._segments.values() for piece in segment.pieces}
        asked = [number for number, view in enumerate(views) if view.nbytes >= LARGE_BYTES and view.nbytes in sizes]
        if not asked:
            return {}
        found, files = {}, FileMemory.now()
        for number in asked:
            if (place := self._place(views[number], files)) is not None:
                found[number] = place
                self._segments.move_to_end(place[0])
        return found

    def _place(self, view: memoryview, files: FileMemory) -> tuple[str, int] | None:
        if device_memory.reader_of(view) is not None:
            return None
        from_file = files.holds(view)
        spots = None if from_file else spots_of(view)
        known = [
            (name, segment, piece)
            for name, segment in reversed(self._segments.items())
            for piece in segment.with_spots(view.nbytes)
            if spots in (None, piece.spots)
        ]
        if not known:
            return None
        try:
            digest = (digest_of_file_memory if from_file else digest_of_view)(view, self._seed)
            return next(
                ((name, piece.start) for name, segment, piece in known if segment.hashed(piece) == digest), None
            )
        except OSError:  # a file that was truncated: the code that writes the buffer reports it
            return None


class _Segment:
    """Sealed memory with buffers that were sent."""

    def __init__(self, fd: int, pieces: Sequence[_Piece], seed: int) -> None:
        self.fd, self.pieces = fd, list(pieces)
        self.size_bytes = os.fstat(fd).st_size
        self._seed, self._lock = seed, threading.Lock()

    def with_spots(self, size_bytes: int) -> Iterator[_Piece]:
        """Yield the pieces of this size, with their spots."""
        for piece in self.pieces:
            if piece.size_bytes == size_bytes:
                piece.spots = piece.spots or self._spots(piece)
                yield piece

    def _spots(self, piece: _Piece) -> bytes:
        return b"".join(os.pread(self.fd, _SPOT_BYTES, piece.start + at) for at in _spots(piece.size_bytes))

    def hashed(self, piece: _Piece) -> bytes:
        """Return the hash of a piece; empty if the memory was freed before it was known."""
        self.hash_all()
        return piece.digest

    @property
    def is_hashed(self) -> bool:
        return all(piece.digest for piece in self.pieces)

    def hash_all(self) -> None:
        with self._lock:
            if self.is_hashed or self.fd < 0:
                return
            for piece in self.pieces:
                piece.digest = digest_of(piece.size_bytes, self._seed, partial(self._hash_part, piece.start))

    def _hash_part(self, piece_start: int, start: int, size_bytes: int, hasher: Any) -> None:
        with shared_memory.map_part(self.fd, piece_start + start, size_bytes, reading=True) as part:
            hasher.update(part)

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


def _tidy(unused: Sequence[_Segment], large: Sequence[_Segment]) -> None:
    for segment in large:
        with suppress(OSError):  # the next cell tries again
            segment.hash_all()
    for segment in unused:
        segment.close()


def _piece(view: memoryview, start: int) -> _Piece:
    return _Piece(start=start, size_bytes=view.nbytes, address=address_of(view))


def spots_of(view: memoryview) -> bytes:
    """Return bytes from places all over a large buffer: most changes show in them."""
    return b"".join(view[at : at + _SPOT_BYTES] for at in _spots(view.nbytes))


def _spots(size_bytes: int) -> Iterator[int]:
    """Yield the beginnings of the spots of a buffer, the last of which is its end."""
    step = (size_bytes - _SPOT_BYTES) // (_SPOTS - 1)
    yield from range(0, step * (_SPOTS - 1), step)
    yield size_bytes - _SPOT_BYTES
