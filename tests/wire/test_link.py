"""Frames between kernel, agent and ranks: every message survives, nothing else gets through."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.wire import link
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link, LinkError, decode, encode, peer_uid

m.load_all()
CLASSES = sorted(m.shared.CLASSES.values(), key=lambda cls: cls.__name__)


def sample(cls: type, depth: int = 0) -> object:
    """An instance with a telling value in every field."""
    hints = typing.get_type_hints(cls, dict(m.shared.CLASSES))
    return cls(**{field.name: value_of(hints[field.name], depth) for field in dataclasses.fields(cls)})


def value_of(hint: object, depth: int) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return value_of(arguments[0], depth) if depth < 3 else None
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return (value_of(arguments[0], depth + 1), value_of(arguments[0], depth + 1)) if depth < 3 else ()
    if origin is dict:
        return {
            "": value_of(arguments[1], depth + 1),
            "$b": value_of(arguments[1], depth + 1),
            "ü\0": value_of(arguments[1], depth),
        }
    if dataclasses.is_dataclass(hint):
        return sample(hint, depth + 1)  # type: ignore[arg-type]
    simple = {
        int: -(2**70),
        float: 0.1,
        str: "ü\n\ud800"[:2] + "\0",
        bytes: bytes(range(256)),
        bool: True,
        object: (b"\0", {"$": b""}, 1, None),
    }
    return simple[hint]  # type: ignore[index]


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ours, theirs = map(Link, socket.socketpair())
    before = len(os.listdir("/proc/self/fd"))
    yield ours, theirs
    assert len(os.listdir("/proc/self/fd")) <= before
    ours.close()
    theirs.close()


def pipe_fds(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_comes_back_equal(cls: type, pair: tuple[Link, Link]) -> None:
    message = sample(cls)
    if cls not in m.shared.MESSAGES:
        message = m.Displayed(run="a-1", rank=0, data={}, metadata={"it": message}, at_s=0.0)
    a, b = pair
    a.send(message)
    assert b.receive() == (message, [])
    assert link.kind_of(encode(message)) == type(message).__name__


def test_a_frame_may_be_passed_on_as_it_is(pair: tuple[Link, Link]) -> None:
    a, b = pair
    message, files = sample(m.Returned), pipe_fds(2)
    a.send(message, files)
    frame, fds = b.receive_frame()
    assert (frame, len(fds)) == (encode(message, 2), 2)
    b.pass_on(frame, fds)
    b.send(m.Leave())
    again, copies = a.receive()
    assert (again, len(copies)) == (message, 2)
    assert a.receive() == (m.Leave(), [])
    for fd in (*files, *fds, *copies):
        os.close(fd)


def test_frames_may_be_cut_anywhere() -> None:
    messages = [sample(cls) for cls in (m.Execute, m.Returned, m.Leave, m.Wrote)]
    stream = b"".join(map(encode, messages))
    for cut in range(0, len(stream), 7):
        ours, theirs = socket.socketpair()
        reader = Link(theirs)
        theirs.setblocking(False)
        got = []
        for part in (stream[:cut], stream[cut:]):
            ours.sendall(part)
            got += [message for message, _ in reader.read()]
        assert got == messages
        ours.close()
        reader.close()


def test_a_frame_may_come_byte_by_byte(pair: tuple[Link, Link]) -> None:
    a, b = pair
    b.sock.setblocking(False)
    message, got = sample(m.Hello), []
    for byte in encode(message):
        a.sock.send(bytes([byte]))
        got += list(b.read())
    assert got == [(message, [])]
    assert list(b.read()) == []


def test_descriptors_stay_with_their_frame(pair: tuple[Link, Link]) -> None:
    a, b = pair
    files = pipe_fds(3)
    inodes = [os.fstat(fd).st_ino for fd in files]
    a.send(m.Leave())
    a.send(m.ResetGroups(port=1), files[:1])
    a.send(m.Leave())
    a.send(m.ResetGroups(port=2), files[1:])
    got = [b.receive() for _ in range(4)]
    assert [len(fds) for _, fds in got] == [0, 1, 0, 2]
    received = [fd for _, fds in got for fd in fds]
    assert [os.fstat(fd).st_ino for fd in received] == inodes
    assert not any(os.get_inheritable(fd) for fd in received), "a program that a rank starts must not get them"
    for fd in (*files, *received):
        os.close(fd)


def test_posted_frames_wait_for_room(pair: tuple[Link, Link]) -> None:
    a, b = pair
    a.sock.setblocking(False)
    files = pipe_fds(1)
    big = m.Wrote(run="r", rank=0, stream="stdout", text="x" * 300_000)
    for _ in range(10):
        a.post(encode(big))
    a.post(encode(m.ResetGroups(port=1), 1), files)
    a.post(encode(m.Leave()))
    b.sock.setblocking(False)
    got = []
    while len(got) < 12:
        a.flush()
        got += list(b.read())
    assert not a.unsent
    assert [message for message, _ in got] == [big] * 10 + [
        m.ResetGroups(port=1),
        m.Leave(),
    ]
    assert len(got[10][1]) == 1
    for fd in (*files, *got[10][1]):
        os.close(fd)


def test_close_gives_back_what_nobody_took() -> None:
    before = len(os.listdir("/proc/self/fd"))
    a, b = map(Link, socket.socketpair())
    files = pipe_fds(4)
    a.send(m.ResetGroups(port=1), files)
    b._fill()
    a.post(encode(m.Leave(), 4), files)
    a.close()
    b.close()
    for fd in files:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_end_of_the_peer_is_eof(pair: tuple[Link, Link]) -> None:
    a, b = pair
    a.sock.send(encode(m.Leave())[:5])
    a.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(EOFError):
        b.receive()


def test_receive_one_leaves_the_rest() -> None:
    a, b = map(Link, socket.socketpair())
    first = m.Fork(orders=(sample(m.WorkerOrder),))  # type: ignore[arg-type]
    a.send(first)
    a.send(m.Leave())
    assert b.receive_one() == first
    assert Link(b.sock).receive() == (m.Leave(), [])
    a.close()
    b.close()


def frame(text: bytes, sizes: tuple[int, ...] = (), blobs: bytes = b"", fds: int = 0) -> bytes:
    return (
        struct.pack("!IHH", len(text), len(sizes), fds) + b"".join(struct.pack("!Q", n) for n in sizes) + text + blobs
    )


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!IHH", 2**32 - 1, 0, 0),
        struct.pack("!IHH", 2, 1, 0) + struct.pack("!Q", 2**63) + b"{}",
        struct.pack("!IHH", 2, 2, 0) + struct.pack("!QQ", 2**40, 2**40) + b"{}",
        frame(b"{}"),
        frame(b"5"),
        frame(b"null"),
        frame(b"[]"),
        frame(b'"Leave"'),
        frame(b'{"$":"Leave"}', fds=1),
        frame(b'{"$":"Leave","x":1}'),
        frame(b'{"$":"Hello"}'),
        frame(b'{"$":"os.system"}'),
        frame(b'{"$":["Leave"]}'),
        frame(b'{"$b":0}'),
        frame(b'{"$b":0}', (1,), b"x"),
        frame(b'{"$":"Forget","group":{"$b":7},"keys":[]}', (1,), b"x"),
        frame(b'{"$d":[1]}'),
        frame(b'{"$d":{"$":1}}'),
        frame(b"\xff\xfe"),
        frame(b"[" * 100_000),
        frame(b'{"$":"Leave"'),
        frame(b""),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 100,
    ],
)
def test_what_is_not_a_frame_is_refused(data: bytes, pair: tuple[Link, Link]) -> None:
    a, b = pair
    a.sock.sendall(data)
    with pytest.raises(LinkError):
        b.receive()


def test_only_messages_come_out() -> None:
    with pytest.raises(LinkError):
        decode(b'{"$d":{"a":1}}', [])
    with pytest.raises(LinkError):
        decode(b'{"$t":{"a":"b"}}', [])
    assert decode(b'{"$":"Leave"}', []) == m.Leave()


@pytest.mark.parametrize(
    "name", ["Parcel", "Cell", "Setting", "Popen", "subprocess.Popen", "eval", "Link", "object", "", "message"]
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a message"])
def test_no_class_comes_out_but_messages_and_their_parts(name: str, inside: bool) -> None:
    fields = {"Parcel": '"data":""', "Cell": '"source":"1","filename":"x"'}.get(name, "")
    value = f'{{{fields}{"," if fields else ""}"$":"{name}"}}'
    whole = f'{{"run":"r","rank":0,"value":{value},"$":"Returned"}}' if inside else value
    if inside and name in ("Parcel", "Cell", "Setting"):
        assert type(decode(whole.encode(), [])).__name__ == "Returned"
    else:
        with pytest.raises(LinkError):
            decode(whole.encode(), [])


def test_every_message_says_by_its_base_which_way_it_goes_and_no_part_does() -> None:
    bases = (m.Command, m.Event, m.RelayMessage)
    assert {cls for cls in CLASSES if issubclass(cls, bases)} == m.shared.MESSAGES < set(CLASSES)


def test_a_process_finds_the_messages_of_a_conversation_that_it_has_not_loaded() -> None:
    program = "import sys; from jupyter_distrib.wire import messages as m; assert m.SELDOM[0] not in vars(m)\nprint(m.Fork.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "Fork\n"
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = m.Nothing


def test_a_message_of_a_conversation_that_was_not_loaded_is_decoded() -> None:
    frame = encode(m.RelayPassed(frames=b"x"))
    program = f"""
import sys
from jupyter_distrib.wire import link
assert "jupyter_distrib.wire.messages.relay" not in sys.modules
print(link.decode_frame({frame!r})[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "RelayPassed(frames=b'x', has_content=False)\n"


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ("    pid: int", "    pid: float", True),
        ("    force: bool = False", "    force: bool = True", True),
        ("kill what does not end", "end what goes on", False),
    ],
)
@pytest.mark.parametrize("archived", [False, True])
def test_the_protocol_differs_with_fields_only(
    before: str, after: str, differs: bool, archived: bool, tmp_path: Path
) -> None:
    """Also in an archive, as other machines get the package."""
    root = Path(m.__file__).parent.parent.parent
    for file in [*root.glob("*.py"), *root.glob("wire/**/*.py"), *root.glob("system/*.py")]:
        copy = tmp_path / "jupyter_distrib" / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        source = file.read_text("utf-8")
        copy.write_text(source.replace(before, after) if copy.parent.name == "messages" else source, "utf-8")
    path = shutil.make_archive(str(tmp_path / "source"), "zip", tmp_path, "jupyter_distrib") if archived else tmp_path
    program = f"import sys; sys.path.insert(0, {str(path)!r}); from jupyter_distrib.wire import messages as m; print(m.PROTOCOL)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path.parent
    )
    assert (int(done.stdout) != m.PROTOCOL) is differs


def test_noise_neither_crashes_nor_leaks() -> None:
    """10,000 frames, damaged in every way (S4): each is refused with `LinkError` or `EOFError`, or is a message."""
    rng = random.Random(7)
    whole = [encode(sample(cls)) for cls in sorted(m.shared.MESSAGES, key=lambda cls: cls.__name__)]
    before = len(os.listdir("/proc/self/fd"))
    refused = 0
    for number in range(10_000):
        data = damaged(rng, bytearray(rng.choice(whole)))
        ours, theirs = socket.socketpair()
        reader = Link(theirs)
        theirs.setblocking(False)
        if number % 10 == 0:
            file = os.open(os.devnull, os.O_RDONLY)
            socket.send_fds(ours, [data[:60_000] or b"x"], [file] * rng.randrange(1, 4))
            os.close(file)
        elif data:
            ours.send(data[:100_000])
        ours.close()
        try:
            while True:
                for message, fds in reader.read():
                    assert isinstance(message, m.Message)
                    for fd in fds:
                        os.close(fd)
        except (EOFError, LinkError) as error:
            refused += isinstance(error, LinkError)
        reader.close()
    assert refused > 1000
    assert len(os.listdir("/proc/self/fd")) == before


def damaged(rng: random.Random, data: bytearray) -> bytes:
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 3:
            data[: rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))
        case 4:
            at = rng.randrange(len(data))
            data[at:at] = rng.randbytes(rng.randrange(1, 50))
        case 5:
            data += rng.randbytes(rng.randrange(100))
    return bytes(data)


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parcel stays bytes until somebody who knows where it came from opens it."""
    import pickle

    bomb = b"cos\nsystem\n(S'touch /tmp/never'\ntR."
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    message = m.Returned(run="r", rank=0, value=m.Parcel(data=bomb))
    prefix, blobs = struct.unpack_from("!IHH", encode(message)), encode(message)
    assert prefix[1] == 1
    at = 8 + 8
    got = decode(blobs[at : at + prefix[0]], [blobs[at + prefix[0] :]])
    assert got == message
    assert "pickle" not in vars(link)
    assert json.loads(blobs[at : at + prefix[0]])["$"] == "Returned"


def test_the_peers_user_is_known(pair: tuple[Link, Link]) -> None:
    assert peer_uid(pair[0].sock) == os.getuid()
