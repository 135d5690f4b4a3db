"""One exchange of texts between all ranks of a group, which does not block until it is waited for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_HEAD = 8
_CAPACITY = 2048
"""The bytes of a text that travel with its length; longer texts take a second step."""


class TextExchange:
    """An exchange that has begun; every rank of the group begins one with its own text.

    Args:
        group: A group that has gloo for the CPU, in which nothing else is sent.
        text: This rank's text.
    """

    def __init__(self, group: Any, text: str) -> None:
        self._group = group
        self._mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        first = torch.zeros(_HEAD + _CAPACITY, dtype=torch.uint8)
        first[:_HEAD] = torch.tensor([len(self._mine)]).view(torch.uint8)
        part = self._mine[:_CAPACITY]
        first[_HEAD : _HEAD + len(part)] = part
        self._lengths: list[int] = []
        self._parts: list[torch.Tensor] = []
        self._begin(first)

    def texts(self, *, wait: bool) -> list[str] | None:
        """Return the texts by rank, or None if they have not come and `wait` is False.

        Raises:
            RuntimeError: A rank is lost.
        """
        if not self._has_come(wait=wait):
            return None
        if not self._lengths:
            self._lengths = [int(part[:_HEAD].view(torch.int64)) for part in self._parts]
            if max(self._lengths) > _CAPACITY:
                whole = torch.zeros(max(self._lengths), dtype=torch.uint8)
                whole[: len(self._mine)] = self._mine
                self._begin(whole)
                return self.texts(wait=wait)
            self._parts = [part[_HEAD:] for part in self._parts]
        both = zip(self._parts, self._lengths, strict=True)
        return [part[:length].numpy().tobytes().decode() for part, length in both]

    def _begin(self, mine: torch.Tensor) -> None:
        self._parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        self._work: Any = dist.all_gather(self._parts, mine, group=self._group, async_op=True)

    def _has_come(self, *, wait: bool) -> bool:
        if wait or self._work.is_completed():
            self._work.wait()
            return True
        return False
