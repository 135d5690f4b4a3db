"""One end of the stream socket that carries commands and events, with the file descriptors that belong to a frame.

A frame is a fixed prefix, the message as JSON, and the raw bytes that the JSON refers to. This module unpickles
nothing, and a decoded message can only be an instance of a class in `wire/messages/`. Both ends are unix sockets of one
user: inherited pairs, or a socket in a 0700 directory whose peer's uid was checked (`peer_uid`).

`send` and `receive` block and may be used by one thread each. `post` and `flush` never block, nor does `read` if the
socket does not; they belong to the agent's loop, or to code that lets only one thread use the link.
"""

from __future__ import annotations

import itertools
import json
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from jupyter_distrib.system import open_files
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors
from jupyter_distrib.wire.messages.shared import CLASSES, FIELDS, MESSAGES

_PREFIX = struct.Struct("!IHH")
_SIZE = struct.Struct("!Q")
_READ_BYTES = 1 << 16
"""Bytes per read: with a buffer four times as large, malloc asks the system at each read, which takes longer than
the read itself."""
_GATHER = 64
_FD_BYTES = struct.calcsize("i")
_FDS_BYTES = socket.CMSG_LEN(253 * _FD_BYTES)
"""Bytes of the descriptors in one message: Linux passes at most 253 (SCM_MAX_FD, unix(7))."""
_MAX_FRAME_BYTES = 1 << 28
"""Limit on a frame: larger contents lie in shared memory, so a frame that claims more is invalid."""
_SIMPLE = frozenset({str, int, float, bool, type(None)})
"""Types that JSON has itself."""
_CLASS = b'"$":"'
_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class LinkError(ConnectionError):
    """Raised when the peer has sent something that is not a frame."""


class Link:
    """A stream of messages over one connected unix stream socket; the first bytes may have come already."""

    def __init__(self, sock: socket.socket, arrived: bytes = b"") -> None:
        self.sock = sock
        self._incoming = bytearray(arrived)
        self._arrived: deque[list[int]] = deque()
        """Descriptors that were received and not yet taken, grouped by frame."""
        self._outgoing: deque[tuple[memoryview, Descriptors]] = deque()
        self.frame = b""
        """Last message that `read` gave, still encoded: a relay sends it on without encoding it again."""
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        """Close the socket and every descriptor that was received and not yet taken, or posted and not yet sent."""
        for fds in self._arrived:
            Descriptors(fds).close()
        self._arrived.clear()
        for _, descriptors in self._outgoing:
            descriptors.close()
        self._outgoing.clear()
        self.sock.close()

    def send(self, message: m.Message, fds: Iterable[int] = (), *, after: Iterable[m.Message] = ()) -> None:
        """Send one message, together with those queued before it; the caller keeps its own copies of `fds`."""
        fds = list(fds)
        self.pass_on(b"".join((*map(encode, after), encode(message, len(fds)))), fds)

    def pass_on(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame as it is."""
        data = memoryview(frame)
        with self._send_lock:
            while data:
                sent = socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data)
                data, fds = data[sent:], []

    def receive(self) -> tuple[m.Message, list[int]]:
        """Wait for one message. Raises `EOFError` when the peer has gone.

        `open_files.LOST` takes the place of each descriptor that this process could not open.
        """
        frame, fds = self.receive_frame()
        return decode_frame(frame)[0], fds

    def receive_frame(self) -> tuple[bytes, list[int]]:
        """Wait for one message and return its frame, for a relay. Raises `EOFError` when the peer has gone."""
        while (found := self._next()) is None:
            self._fill()
        return found

    def receive_one(self) -> m.Message:
        """Wait for one message without reading beyond it, for a caller that continues with another `Link`."""
        head = self.sock.recv(_PREFIX.size, socket.MSG_PEEK | socket.MSG_WAITALL)
        json_bytes, _, _ = _PREFIX.unpack(head)
        whole = self.sock.recv(_PREFIX.size + json_bytes, socket.MSG_WAITALL)
        return decode(whole[_PREFIX.size :], [])

    def wait(self, timeout_s: float) -> bool:
        """Wait at most this long; return whether something has arrived."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(self._incoming or poll.poll(timeout_s * 1000))

    def post(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame for `flush`; `fds` are duplicated, unless it can be sent at once. Raises `OSError`."""
        data = memoryview(frame)
        if fds and not self._outgoing:  # this process may have no room for duplicates
            with suppress(BlockingIOError, InterruptedError):
                data, fds = data[socket.send_fds(self.sock, [data], fds, socket.MSG_DONTWAIT) :], ()
        if data:
            self._outgoing.append((data, Descriptors.duplicates(fds) if fds else NO_DESCRIPTORS))

    def flush(self) -> bool:
        """Send as much as the socket accepts now. Return whether that is all."""
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            try:
                if descriptors is NO_DESCRIPTORS:
                    sent = self.sock.sendmsg(self._plain_run(), (), socket.MSG_DONTWAIT)
                else:
                    sent = socket.send_fds(self.sock, [data], tuple(descriptors), socket.MSG_DONTWAIT)
                    descriptors.close()
            except (BlockingIOError, InterruptedError):
                return False
            self._sent(sent)
        return True

    def _plain_run(self) -> list[memoryview]:
        """Return the next frames that need no descriptors, to be sent together."""
        frames = itertools.takewhile(
            lambda entry: entry[1] is NO_DESCRIPTORS, itertools.islice(self._outgoing, _GATHER)
        )
        return [data for data, _ in frames]

    def _sent(self, count: int) -> None:
        while count:
            data, _ = self._outgoing.popleft()
            if count < len(data):
                self._outgoing.appendleft((data[count:], NO_DESCRIPTORS))
            count -= min(count, len(data))

    @property
    def unsent(self) -> bool:
        return bool(self._outgoing)

    def read(self) -> Iterable[tuple[m.Message, list[int]]]:
        """Return the messages that have arrived, to be iterated at once. Raises `EOFError` when the peer has gone."""
        try:
            self._fill()
        except (BlockingIOError, InterruptedError):
            return []
        return self.arrived()

    def arrived(self) -> Iterator[tuple[m.Message, list[int]]]:
        """Yield the messages that were read already, one after another, so that `frame` is that of the message in hand;
        none after `close`."""
        while self.sock.fileno() >= 0 and (found := self._next()) is not None:
            self.frame, fds = found
            yield decode_frame(self.frame)[0], fds

    @property
    def has_frame(self) -> bool:
        """Return whether a whole message has arrived that was not received yet."""
        length = frame_length(self._incoming)
        return length is not None and len(self._incoming) >= length

    def _fill(self) -> None:
        try:
            # Not `socket.recv_fds`, which ignores its flags (Python 3.11 to 3.14): programs that ranks start would get
            # the descriptors.
            data, ancillary, flags, _ = self.sock.recvmsg(_READ_BYTES, _FDS_BYTES, _CLOSE_ON_EXEC)
        except ConnectionResetError as error:
            raise EOFError from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = struct.unpack(f"{len(content) // _FD_BYTES}i", content[: len(content) // _FD_BYTES * _FD_BYTES])
                self._arrived.append(list(fds))
        if flags & socket.MSG_CTRUNC:  # this process can open no more: the receiver of the message must know
            if not ancillary:
                self._arrived.append([])
            self._arrived[-1] += [open_files.LOST]
        if not data:
            raise EOFError
        self._incoming += data

    def _next(self) -> tuple[bytes, list[int]] | None:
        """Return the next frame, if it is complete."""
        incoming = self._incoming
        length = frame_length(incoming)
        if length is None or len(incoming) < length:
            return None
        _, _, fd_count = _PREFIX.unpack_from(incoming)
        fds = self._arrived.popleft() if fd_count and self._arrived else []
        if open_files.LOST in fds:
            fds += [open_files.LOST] * (fd_count - len(fds))
        if len(fds) != fd_count and fds:
            self._arrived.appendleft(fds[fd_count:] if len(fds) > fd_count else fds)
        if len(fds) < fd_count:
            raise LinkError(f"{fd_count - len(fds)} of {fd_count} descriptors have not arrived")
        frame = bytes(memoryview(incoming)[:length])
        del incoming[:length]
        return frame, fds[:fd_count]


_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def encode(message: m.Message, fd_count: int = 0) -> bytes:
    """Encode one frame; `fd_count` descriptors are expected to travel with it."""
    return b"".join(encode_pieces(message, fd_count))


def encode_pieces(message: m.Message, fd_count: int = 0) -> list[bytes]:
    """Encode one frame as consecutive pieces, without copying its raw bytes."""
    blobs: list[bytes] = []
    text = _JSON.encode(_plain(message, blobs)).encode()
    sizes = b"".join(_SIZE.pack(len(blob)) for blob in blobs)
    return [b"".join((_PREFIX.pack(len(text), len(blobs), fd_count), sizes, text)), *blobs]


def decode_frame(frame: bytes | memoryview) -> tuple[m.Message, int]:
    """Decode one whole frame, and the number of its descriptors. If the frame is a view, raw bytes are views of it."""
    json_bytes, blob_count, fd_count = _PREFIX.unpack_from(frame)
    at = _PREFIX.size + _SIZE.size * blob_count
    text, at = bytes(frame[at : at + json_bytes]), at + json_bytes
    blobs: list[Any] = []
    for size in _sizes(frame, blob_count):
        blobs.append(frame[at : at + size])
        at += size
    return decode(text, blobs), fd_count


def kind_of(frame: bytes) -> str:
    """Return the class name of the message in a whole frame; it comes last in the frame's text."""
    json_bytes, blob_count, _ = _PREFIX.unpack_from(frame)
    end = _PREFIX.size + _SIZE.size * blob_count + json_bytes
    return frame[frame.rindex(_CLASS, 0, end) + len(_CLASS) : end].rstrip(b'"}').decode()


def split(frames: bytes) -> Iterator[bytes]:
    """Yield consecutive whole frames."""
    at = 0
    while (length := frame_length(frames, at)) is not None:
        yield frames[at : at + length]
        at += length


def frame_length(incoming: bytes | bytearray, at: int = 0) -> int | None:
    """Return the length of the frame at an offset; None if too little of it has arrived."""
    if len(incoming) < at + _PREFIX.size:
        return None
    json_bytes, blob_count, _ = _PREFIX.unpack_from(incoming, at)
    if json_bytes > _MAX_FRAME_BYTES:
        raise LinkError(f"a frame of {json_bytes} bytes is too long")
    head_bytes = _PREFIX.size + _SIZE.size * blob_count
    if len(incoming) < at + head_bytes:
        return None
    if (blob_bytes := sum(_sizes(incoming, blob_count, at))) > _MAX_FRAME_BYTES:
        raise LinkError(f"a frame with {blob_bytes} bytes is too long")
    return int(head_bytes + json_bytes + blob_bytes)


def _sizes(frame: bytes | bytearray | memoryview, blob_count: int, at: int = 0) -> tuple[int, ...]:
    """Return the sizes of the raw bytes behind the text of the frame that begins at an offset."""
    return struct.unpack_from(f"!{blob_count}Q", frame, at + _PREFIX.size)


def decode(text: bytes, blobs: list[Any]) -> m.Message:
    """Decode one message. Raises `LinkError` for anything that `encode` would not write."""
    try:
        message: m.Message = _rich(json.loads(text), blobs)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise LinkError(f"not a frame of protocol {m.PROTOCOL}: {error!r}") from error
    if type(message) not in MESSAGES:
        raise LinkError(f"not a message of protocol {m.PROTOCOL}: {type(message).__name__}")
    return message


def _plain(value: object, blobs: list[bytes]) -> object:
    kind = type(value)
    if (known := FIELDS.get(kind)) is not None:
        out = {}
        for name, default in known:
            item = getattr(value, name)
            if item is not default:  # else the reader has the same default
                out[name] = item if type(item) in _SIMPLE else _plain(item, blobs)
        out["$"] = kind.__name__
        return out
    if isinstance(value, (bytes, memoryview)):
        blobs.append(bytes(value))
        return {"$b": len(blobs) - 1}
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _SIMPLE else _plain(item, blobs) for item in value]
    if isinstance(value, dict):
        if _SIMPLE.issuperset(map(type, value.values())):  # an environment: its values need no conversion
            return {"$t": value}
        return {"$d": {key: _plain(item, blobs) for key, item in value.items()}}
    return value


def _rich(value: Any, blobs: list[Any]) -> Any:
    if isinstance(value, list):
        return tuple([item if type(item) in _SIMPLE else _rich(item, blobs) for item in value])
    if not isinstance(value, dict):
        return value
    if (name := value.pop("$", None)) is not None:
        given = {name: item if type(item) in _SIMPLE else _rich(item, blobs) for name, item in value.items()}
        return (CLASSES.get(name) or _loaded(name))(**given)
    if "$b" in value:
        return blobs[value["$b"]]
    if "$t" in value:
        return value["$t"]
    return {key: _rich(item, blobs) for key, item in value["$d"].items()}


def _loaded(name: str) -> type:
    """Return a class of a conversation that was not loaded yet. Raises `KeyError` if there is none."""
    m.load_all()
    return CLASSES[name]


def peer_uid(sock: socket.socket) -> int | None:
    """Return the user id of the peer of a unix socket; None where the system does not report it."""
    peer = _peer(sock)
    return None if peer is None else peer[1]


def peer_pid(sock: socket.socket) -> int | None:
    """Return the process that listens, or has connected, at the other end of a unix socket; 0 if it is not visible from
    here, as in another container. None where the system does not report it."""
    peer = _peer(sock)
    return None if peer is None else peer[0]


def _peer(sock: socket.socket) -> tuple[int, int] | None:
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid
