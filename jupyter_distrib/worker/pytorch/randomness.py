"""The random numbers of a rank, as torch, Python and numpy draw them on the CPU.

Every rank begins with its own seed, as separate programs do. Ranks that train together begin each cell with the
streams of rank 0, so that what a cell draws before it trains (a random split, say) is the same on all of them, however
often these ranks have drawn something else before. A cell that seeds gets what it says.
"""

from __future__ import annotations

import base64
import ctypes
import json
import random
import struct
import sys
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch

from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.pytorch import process_group

SEEDED_APART = (
    "an earlier cell had seeded the ranks differently; this one begins with the random numbers of rank 0 on all of "
    "them, so that they split data alike. Seed by rank in this cell if they are to differ"
)
_drawn_seed: int | None = None
"""The seed of torch that this process has drawn when it became a rank."""


def begin() -> None:
    """Draw new seeds when a process becomes a rank: a fork has the state of its parent."""
    global _drawn_seed
    _drawn_seed = torch.default_generator.seed()
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def begin_alike(note: Callable[[str], None]) -> None:
    """Go on with the streams of rank 0. Called before each run in which the ranks train together, on all of them.

    Args:
        note: Is called with a sentence if an earlier cell had seeded this rank otherwise than rank 0.
    """
    board = process_group.current.board()
    if board is None or identity.world_size() == 1:
        return
    streams = _streams()
    mine = _digest(streams)
    if identity.rank() == 0:
        whole = {name: (base64.b64encode(state).decode(), rest) for name, (state, rest) in streams.items()}
        board.put("streams", json.dumps(whole))
        board.put("digest of streams", mine)
    elif board.get("digest of streams") != mine:
        before = torch.initial_seed()
        _read(board.get("streams"))
        if before not in (_drawn_seed, torch.initial_seed()):
            note(SEEDED_APART)


def _digest(streams: dict[str, tuple[bytes, list[Any]]]) -> str:
    digest = blake2b()
    for state, rest in streams.values():
        digest.update(state)
        digest.update(repr(rest).encode())
    return digest.hexdigest()


def _streams() -> dict[str, tuple[bytes, list[Any]]]:
    """Return the state of each generator: its numbers as bytes, and the rest."""
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
    """Return numpy, if it is loaded and draws with the generator that it begins with."""
    numpy = sys.modules.get("numpy")
    return numpy if numpy is not None and numpy.random.get_state()[0] == "MT19937" else None
