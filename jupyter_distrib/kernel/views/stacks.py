"""The Python stacks of the ranks as text, with ranks at the same place shown together.

    ranks 0-2
      Cell In[5], line 14, in train
        loss.backward()
      ... 3 calls inside torch
      File ~/env/lib/python3.11/site-packages/torch/autograd/graph.py:865, in _engine_run_backward
        return Variable._execution_engine.run_backward(
    rank 3 does not answer: C code holds Python's lock

Kernel side; pure functions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from jupyter_distrib.kernel.analysis import traceback_text
from jupyter_distrib.system.formatting import clipped, rank_list
from jupyter_distrib.wire import messages as m

TEXT_CHARACTERS = 200
_PACKAGE = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/([^/.]+)")


def as_text(stacks: Mapping[int, m.StackSeen]) -> str:
    """Return the distinct stacks, each with its ranks."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault((stack.trouble, tuple(lines(stack.frames))), []).append(rank)
    parts = []
    for (trouble, of_stack), ranks in groups.items():
        parts += [f"{rank_list(ranks)} {trouble}".rstrip(), *(f"  {line}" for line in of_stack)]
    return "\n".join(parts)


def lines(frames: Sequence[m.Frame]) -> Iterator[str]:
    """Yield the lines of one stack, outermost first: all frames of the user, and only the first and last of a
    library's."""
    for of_user, group in itertools.groupby(frames, traceback_text.is_user):
        shown = list(group)
        if of_user or len(shown) <= 2:
            yield from _frames(shown)
            continue
        yield from _frames(shown[:1])
        if count := len(shown) - 2:
            yield f"... {count} call{'s' * (count != 1)} inside {_package(shown[0].filename)}"
        yield from _frames(shown[-1:])


def _frames(frames: Sequence[m.Frame]) -> Iterator[str]:
    for frame in frames:
        yield traceback_text.where(frame)
        if frame.text:
            yield f"  {clipped(frame.text, TEXT_CHARACTERS)}"


def _package(filename: str) -> str:
    found = _PACKAGE.match(filename)
    return found[1] if found else "a library"
