"""The random number generators of torch, Python and numpy on a rank's CPU.

Every rank begins with its own seed, as separate programs do. Ranks that train together begin each cell with the
streams of rank 0, so that what a cell draws before it trains (initial weights, a random split) is the same on all of
them, however often these ranks have drawn something else before. From its first optimizer on, each rank has streams
of its own (dropout, augmentation, batches that the cell draws itself), all derived from the ones that it began with:
rank 0 continues with those. A cell that sets a seed gets that seed.

    begin         a process becomes a rank
    adopt_rank_0  each training cell begins
    draw_apart    the cell has its optimizer
    shared        what all ranks draw alike even then: the order of a sampler, a random split
    alike         the same where the ranks need not meet: the order of an evaluation
    reseed        a batch is read whose number a checkpoint holds, so that the other ranks' streams need not be saved
"""

from __future__ import annotations

import base64
import ctypes
import inspect
import json
import os
import random
import secrets
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import torch

from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.pytorch import process_group

SEEDED_APART = (
    "an earlier cell had seeded the ranks differently; this one begins with the random numbers of rank 0 on all of "
    "them, so that they split data alike. Seed by rank in this cell if they are to differ"
)
_DRAWN_APART = (
    "Once a cell has its optimizer, each rank draws other random numbers: draw what all ranks need alike, such as a "
    "size, from a generator with a fixed seed, such as random.Random(0)."
)
_INITIALISERS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_",
)  # fmt: skip
"""The functions of `torch.nn.init` that draw random numbers, also for `reset_parameters` of layers."""
_drawn_seed: int | None = None
"""The seed of torch that this module has last given this rank: any other seed is the user's."""
_origin = ""
"""The digest of the streams with which all ranks began this cell; empty if they had different ones."""
_shared: dict[str, Any] | None = None
"""The states of the streams that all ranks draw alike, once they draw apart, by name."""
_shared_pid = 0
"""The process that has these streams: a worker of a data loader is a copy of it with seeds of its own."""
_splits = 0
"""The number of random splits since the ranks draw apart."""
_initialised = 0
"""The number of calls of `Module.apply` and of functions of `torch.nn.init` since then."""
_entropy = ""
"""A number of rank 0 for generators without a seed, until the cell has its optimizer; else empty."""
_generators = 0
"""The number of generators without a seed that the cell has made with this number."""
_seeded_before = False
"""Whether an earlier cell has seeded torch."""
_seeded: set[str] = set()
"""The streams that this cell has seeded."""
_undrawn: dict[str, str] = {}
"""Digests of the streams, by name, from when the cell had its first optimizer."""
_SEEDS = {"torch": "torch.manual_seed", "random": "random.seed", "numpy": "numpy.random.seed"}


def begin() -> None:
    """Draw new seeds when a process becomes a rank, since a fork inherits the state of its parent."""
    global _drawn_seed
    _drawn_seed = torch.default_generator.seed()
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def adopt_rank_0(note: Callable[[str], None]) -> None:
    """Adopt the generator states of rank 0. Called on all ranks before each run in which they train together.

    Args:
        note: Called with a message if an earlier cell seeded this rank differently from rank 0.
    """
    global _drawn_seed, _origin, _shared, _splits, _initialised, _entropy, _generators, _seeded_before
    _origin, _shared, _splits, _initialised, _entropy, _generators = "", None, 0, 0, "", 0
    _seeded.clear()
    _undrawn.clear()
    board = process_group.current.board()
    if board is None or identity.world_size() == 1:
        return
    streams = _streams()
    mine, own = _digest(streams), torch.initial_seed()
    if identity.rank() == 0:
        whole = {name: (base64.b64encode(state).decode(), rest) for name, (state, rest) in streams.items()}
        board.put("streams", json.dumps(whole))
        _entropy = secrets.token_hex(16)
        board.put("digest of streams", f"{mine} {_drawn_seed} {_entropy}")
        digest, drawn = mine, str(_drawn_seed)
    else:
        digest, drawn, _entropy = board.get("digest of streams").split()
        if digest != mine:
            _read(board.get("streams"))
            is_rank_0_seeded = str(torch.initial_seed()) != drawn  # it may have been replaced since
            if is_rank_0_seeded and own not in (_drawn_seed, torch.initial_seed()):
                note(SEEDED_APART)
    _seeded_before = str(torch.initial_seed()) != drawn
    if not _seeded_before:
        _drawn_seed, _origin = torch.initial_seed(), digest


def why_apart() -> str:
    """Return a sentence on the numbers that this rank has drawn apart from others, for errors about what differs
    between ranks; empty if it has drawn none."""
    return f" {_DRAWN_APART}" if _shared is not None and _drawn() else ""


def same_draws() -> tuple[str, str]:
    """Return which seeds of the user keep this rank from random numbers of its own in the streams that were drawn from
    since the cell had its optimizer, such as `torch.manual_seed() of an earlier cell`, and the calls that would seed
    these streams by rank; empty if there are none."""
    of_torch = "" if _shared is not None or torch.initial_seed() == _drawn_seed else _SEEDS["torch"]
    causes, calls = dict[str, list[str]](), []
    for name in _drawn():
        if seed := _SEEDS[name] if name in _seeded else of_torch:  # torch's keeps all streams alike
            cell = "an earlier cell" if _seeded_before and _seeded.isdisjoint({name, "torch"}) else "this cell"
            seeds = causes.setdefault(cell, [])
            seeds += [] if f"{seed}()" in seeds else [f"{seed}()"]
            calls.append(f"{_SEEDS[name]}(rank)")
    return " and ".join(f"{' and '.join(seeds)} of {cell}" for cell, seeds in causes.items()), " and ".join(calls)


def watch(replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
    """Record, for the time of a cell, which streams it seeds, and let random splits and the first values of weights be
    the same on all ranks.

    Args:
        replace: Replaces a function of a module, for the time of the cell, by what its third argument makes of it.
    """
    modules = {"random": random, "numpy": getattr(sys.modules.get("numpy"), "random", None)}
    for name, module in modules.items():
        for function in ("seed", "setstate", "set_state"):
            if hasattr(module, function):
                replace(module, function, partial(_recording, name))
    replace(torch, "manual_seed", partial(_recording, "torch"))
    replace(torch.utils.data.dataset, "randperm", _splitting)
    replace(torch.nn.Module, "apply", _initialising)
    for name in _INITIALISERS:
        replace(torch.nn.init, name, partial(_initialising, parameters_only=True))
    if (tensor := sys.modules.get("torch.distributed.tensor")) is not None:
        for name in ("normal_", "uniform_"):
            replace(tensor.DTensor, name, _drawing_whole)
    replace(random.Random, "seed", partial(_seeding_alike, os.getpid()))
    replace(torch, "seed", partial(_seeding_torch_alike, os.getpid()))
    if (bits := sys.modules.get("numpy.random.bit_generator")) is not None and hasattr(bits, "randbits"):
        replace(bits, "randbits", partial(_drawing_entropy, os.getpid()))


def _drawing_entropy(pid: int, original: Callable[[int], int]) -> Callable[[int], int]:
    """Return numpy's source of entropy for generators without a seed (`default_rng()`): the same on all ranks until
    the cell has its optimizer, since it may split data with one."""

    def randbits(bits: int) -> int:
        return original(bits) if not _entropy or os.getpid() != pid else _next_seed(bits // 8)

    return randbits


def _seeding_alike(pid: int, original: Callable[..., None]) -> Callable[..., None]:
    """Return `seed` of Python's generators, which gives generators without a seed the same one on all ranks until
    the cell has its optimizer, as with numpy's; but not to generators of the standard library, such as that of
    temporary names."""

    def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None and _entropy and os.getpid() == pid and not _asked_by_the_standard_library():
            a = _next_seed()
        original(generator, a, version)

    return seed


def _seeding_torch_alike(pid: int, original: Callable[[], int]) -> Callable[[], int]:
    """Return `torch.seed`, which draws a seed: the same one on all ranks until the cell has its optimizer."""

    def seed() -> int:
        global _drawn_seed
        if not _entropy or os.getpid() != pid:
            return original()
        _drawn_seed = _next_seed()  # the user has not chosen this seed, so ranks draw apart later
        with _unrecorded():
            torch.manual_seed(_drawn_seed)
        return _drawn_seed

    return seed


def _asked_by_the_standard_library() -> bool:
    frame, name = inspect.currentframe(), ""
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) in {__name__, "random"}:
        frame = frame.f_back
    return name.partition(".")[0] in sys.stdlib_module_names


def _next_seed(size_bytes: int = 8) -> int:
    global _generators
    _generators += 1
    return _seed(_entropy, f"generator {_generators}", size_bytes=size_bytes)


def _splitting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def randperm(*args: Any, **keywords: Any) -> torch.Tensor:
        global _splits
        if _shared is not None and keywords.get("generator") is torch.default_generator:
            _splits += 1  # not with `shared`: rank 0 may split alone, and samplers are to stay alike
            keywords["generator"] = torch.Generator().manual_seed(_seed(_origin, f"split {_splits}"))
        return original(*args, **keywords)

    return randperm


def _initialising(original: Callable[..., Any], *, parameters_only: bool = False) -> Callable[..., Any]:
    """Return a function that gives weights their first values, often when the cell has its optimizer already:
    `Module.apply`, or one of `torch.nn.init`, which may draw other numbers than parameters."""

    def initialise(*args: Any, **keywords: Any) -> Any:
        global _shared, _initialised
        given = args[0] if args else keywords.get("tensor")
        if (
            _shared is None
            or _shared_pid != os.getpid()
            or (parameters_only and not isinstance(given, torch.nn.Parameter))
        ):
            return original(*args, **keywords)
        _initialised += 1  # not with `shared`, as in a split
        seed = _seed(_origin, f"first values {_initialised}")
        shared, _shared = _shared, None  # a call for a part of the module draws from the same streams
        own = {"torch": torch.get_rng_state()} if parameters_only else _states(shared)
        with _unrecorded():
            _set_states(_states_from(seed, own))
            try:
                return original(*args, **keywords)
            finally:
                _shared = shared
                if torch.initial_seed() != seed:  # the function has seeded it
                    own["torch"] = torch.get_rng_state()
                _set_states(own)

    return initialise


def _drawing_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that fills a sharded tensor. On the CPU, where torch (2.13) lets each rank fill its shard with
    the stream that all have, so that all shards get the same numbers, it draws the whole tensor and takes the
    shard."""

    def fill(sharded: Any, *args: Any, **keywords: Any) -> Any:
        if sharded.device_mesh.device_type != "cpu" or (sharded.requires_grad and torch.is_grad_enabled()):
            return original(sharded, *args, **keywords)
        whole = torch.empty(sharded.shape, dtype=sharded.dtype, device="cpu")
        getattr(whole, original.__name__)(*args, **keywords)
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        return sharded.copy_(distribute(whole, sharded.device_mesh, sharded.placements, src_data_rank=None))

    return fill


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Take back at the end what the block has seeded: this module does so itself, or restores the streams behind it."""
    before = set(_seeded)
    try:
        yield
    finally:
        _seeded.intersection_update(before)


def _recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def seed(*args: Any, **keywords: Any) -> Any:
        _seeded.add(name)
        return original(*args, **keywords)

    return seed


def draw_apart() -> None:
    """Give this rank streams of its own from now on, unless the user has seeded torch. Called on all ranks when the
    cell has its optimizer; only the first call of a cell has an effect."""
    global _entropy
    _entropy = ""
    if _origin and _shared is None and torch.initial_seed() == _drawn_seed:
        _begin_shared(_origin)
        reseed("apart")
    if not _undrawn:
        _undrawn.update((name, _digest({name: stream})) for name, stream in _streams().items())


def _drawn() -> list[str]:
    """Return the names of the streams that were drawn from, or seeded, since the cell had its optimizer."""
    now = _streams().items()
    return [name for name, stream in now if _undrawn.get(name, digest := _digest({name: stream})) != digest]


def _begin_shared(origin: str) -> None:
    global _origin, _shared, _shared_pid
    seed = _seed(origin, "shared")
    _origin, _shared_pid = origin, os.getpid()
    _shared = _states_from(seed, {"torch", "random", "numpy"} - _seeded)


def _states_from(seed: int, names: Collection[str]) -> dict[str, Any]:
    """Return the states that a seed gives these streams."""
    states: dict[str, Any] = {"torch": torch.Generator().manual_seed(seed).get_state()}
    if "random" in names:
        states["random"] = random.Random(seed).getstate()  # noqa: S311 - the user's own stream
    if "numpy" in names and (numpy := _numpy()) is not None:
        states["numpy"] = numpy.random.RandomState(seed % 2**32).get_state()
    return states


def reseed(occasion: str) -> None:
    """Restart this rank's own streams from a seed derived from `occasion`, the same words on all ranks. Rank 0 keeps
    its streams, which a checkpoint saves."""
    global _drawn_seed
    if _shared is None or _shared_pid != os.getpid() or identity.rank() == 0:
        return
    seed = _seed(_origin, f"{identity.rank()} {occasion}")
    torch.default_generator.manual_seed(seed)
    _drawn_seed = seed
    with _unrecorded():
        if "random" in _shared:
            random.seed(seed)
        if "numpy" in _shared:
            sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def shared() -> Iterator[None]:
    """Within the block, draw from streams that all ranks share, at the same point of the cell on each of them."""
    global _shared
    if _shared is None or _shared_pid != os.getpid():
        yield
        return
    states, _shared = _shared, None  # a block inside this one draws from the same streams
    own = _states(states)
    with _unrecorded():
        _set_states(states)
        try:
            yield
        finally:
            _shared = _states(own)
            _set_states(own)


def alike(source: Iterable[Any], occasion: str) -> Iterator[Any]:
    """Yield the elements of a source that draws them at random, the same on all ranks for the same words in `occasion`;
    as the source draws them if the user has seeded torch. Does not touch the streams of `shared`, since some ranks may
    read the source and others not."""
    global _shared
    if _shared is None or _shared_pid != os.getpid() or torch.initial_seed() != _drawn_seed:
        yield from source
        return
    states = _states_from(_seed(_origin, occasion), _shared.keys() - _seeded)
    elements: Iterator[Any] | None = None
    while True:
        kept, _shared = _shared, states
        try:
            with shared():
                elements = iter(source) if elements is None else elements
                element = next(elements)
        except StopIteration:
            return
        finally:
            states, _shared = _shared, kept
        yield element


def state() -> dict[str, Any]:
    """Return this rank's streams as plain values and tensors, for a checkpoint: those of rank 0, with which the other
    ranks' are derived."""
    whole: dict[str, Any] = {"own": _plain(_states(_streams()))}
    if _shared is not None:
        whole |= {"origin": _origin, "shared": _plain(_shared)}
    return whole


def restore(saved: dict[str, Any], occasion: str) -> None:
    """Continue the streams of a checkpoint; for the other ranks' own streams see `reseed`."""
    global _drawn_seed, _shared
    apart = "origin" in saved and _origin
    if apart:
        _begin_shared(saved["origin"])
        assert _shared is not None
        _shared |= _live(saved["shared"])
    _set_states(_live(saved["own"]))
    if apart:
        _drawn_seed = torch.initial_seed()
        reseed(occasion)


def _seed(origin: str, words: str, *, size_bytes: int = 8) -> int:
    return int.from_bytes(blake2b(f"{origin} {words}".encode(), digest_size=size_bytes).digest(), "little")


def _states(names: Iterable[str]) -> dict[str, Any]:
    """Return the present states of these streams."""
    read = {"torch": torch.get_rng_state, "random": random.getstate}
    if "numpy" in names:
        read["numpy"] = sys.modules["numpy"].random.get_state
    return {name: read[name]() for name in names}


def _set_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    with _unrecorded():
        if "random" in states:
            random.setstate(states["random"])
        if "numpy" in states:
            sys.modules["numpy"].random.set_state(states["numpy"])


def _plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of numbers, texts, lists and tensors alone."""
    plain = dict(states)
    if "random" in plain:
        version, numbers, gauss = plain["random"]
        plain["random"] = [version, torch.tensor(numbers), gauss]
    if "numpy" in plain:
        name, key, *rest = plain["numpy"]
        plain["numpy"] = [name, torch.tensor(key.astype("int64")), *rest]
    return plain


def _live(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `_plain`, without numpy where that is not loaded."""
    live = dict(states)
    if "random" in live:
        version, numbers, gauss = live["random"]
        live["random"] = (version, tuple(numbers.tolist()), gauss)
    if "numpy" in live:
        name, key, *rest = live.pop("numpy")
        if (numpy := _numpy()) is not None:
            live["numpy"] = (name, numpy.asarray(key.tolist(), dtype="uint32"), *rest)
    return live


def _digest(streams: dict[str, tuple[bytes, list[Any]]]) -> str:
    digest = blake2b()
    for state, rest in streams.values():
        digest.update(state)
        digest.update(repr(rest).encode())
    return digest.hexdigest()


def _streams() -> dict[str, tuple[bytes, list[Any]]]:
    """Return each generator's state: its numbers as bytes, and the rest."""
    torch_state = torch.get_rng_state()
    version, numbers, gauss = random.getstate()
    streams: dict[str, tuple[bytes, list[Any]]] = {
        "torch": (ctypes.string_at(torch_state.data_ptr(), torch_state.nbytes), []),
        "random": (struct.pack(f"{len(numbers)}I", *numbers), [version, gauss]),
    }
    if (numpy := _numpy()) is not None:
        name, key, *rest = numpy.random.get_state()
        streams["numpy"] = key.tobytes(), [name, *rest]
    return streams


def _read(text: str) -> None:
    streams = {name: (base64.b64decode(state), rest) for name, (state, rest) in json.loads(text).items()}
    state, rest = streams["torch"]
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    state, (version, gauss) = streams["random"]
    random.setstate((version, struct.unpack(f"{len(state) // 4}I", state), gauss))
    if (numpy := _numpy()) is not None and "numpy" in streams:
        state, (name, *rest) = streams["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(state, dtype=numpy.uint32), *rest))


def _numpy() -> Any:
    """Return numpy if it is loaded and still uses its initial generator."""
    numpy = sys.modules.get("numpy")
    return numpy if numpy is not None and numpy.random.get_state()[0] == "MT19937" else None
