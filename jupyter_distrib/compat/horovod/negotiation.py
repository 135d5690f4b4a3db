"""Lets the ranks agree on the next operations to execute, which all of them have issued by the same name.

Each rank of a process set has one `Negotiation`. It works in rounds; in each, all ranks announce their new operations.
A rank that waits for a result takes part in rounds until it has it, and starts none without need, so computing ranks
are not disturbed. A round is a `TextExchange`, which blocks only when it is waited for. An operation that was described
in full once has a number from then on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from jupyter_distrib.compat.horovod.operations import AgreedOperation, SetGroup, perform, unjoinable
from jupyter_distrib.compat.horovod.requests import (
    CollectiveRequest,
    HorovodInternalError,
    SubmittedOperation,
    disagreement,
)


class Negotiation:
    """The negotiation of one process set, on one of its ranks.

    Args:
        control: A gloo group for the texts of the rounds.
        of: The group in which operations are executed.
    """

    def __init__(self, control: Any, of: SetGroup) -> None:
        self._control, self._of = control, of
        self._new: list[SubmittedOperation] = []
        self._mine: dict[str, SubmittedOperation] = {}
        """This rank's pending operations, by name."""
        self._announced: dict[str, dict[int, CollectiveRequest]] = {}
        """All ranks' pending operations, by name, in the order in which they were announced."""
        self._numbers: dict[str, int] = {}
        self._requests: list[CollectiveRequest] = []
        self._joined: list[int] = []
        self._is_joining = False
        self._round: TextExchange | None = None
        self._counts: dict[str, int] = {}

    def name(self, kind: str, given: str | None) -> str:
        """Return the name of an operation; unnamed ones are numbered, which must agree between the ranks."""
        if given is not None:
            return f"{kind}.{given}"
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}.noname.{self._counts[kind]}"

    def submit(self, operation: SubmittedOperation) -> None:
        """Queue an operation, which the next rounds announce to the other ranks.

        Raises:
            ValueError: An operation of this name is still pending.
        """
        name = operation.request.name
        if name in self._mine:
            raise ValueError(
                f"{operation.request.kind} {name!r} was issued again before it was done: call hvd.synchronize first, "
                f"or give it another name"
            )
        self._mine[name] = operation
        self._new.append(operation)

    def progress(self, *, wait: bool) -> None:
        """Take part in a round; without `wait`, only as far as possible without blocking.

        Raises:
            HorovodInternalError: A rank is lost.
        """
        try:
            if self._round is None:
                self._round = TextExchange(self._control, self._message())
            texts = self._round.texts(wait=wait)
            if texts is not None:
                self._round = None
                self._process_round(texts)
        except RuntimeError as error:
            raise HorovodInternalError(
                f"the ranks cannot agree on the next operation; one may be lost: {error}"
            ) from error

    def wait_for(self, operation: SubmittedOperation) -> Any:
        """Return the result of an operation."""
        while not operation.is_agreed:
            self.progress(wait=True)
        return operation.result()

    def is_done(self, operation: SubmittedOperation) -> bool:
        if not operation.is_agreed:
            self.progress(wait=False)
        return operation.is_done()

    def new_bytes(self) -> int:
        """Return the size of the operations not announced yet."""
        return sum(each.tensor.nbytes for each in self._new)

    def finish(self) -> None:
        """Take part in rounds until this rank has no pending operations."""
        while self._mine:
            self.progress(wait=True)

    def join(self) -> int:
        """Take part in the other ranks' operations until all have joined, and return the last one that did."""
        self.finish()
        self._is_joining, last = True, -1
        while self._is_joining:
            self.progress(wait=True)
            last = self._joined[-1]
        self._joined.clear()
        return self._of.ranks[last]

    def _message(self) -> str:
        texts = [json.dumps(each.request.to_json()) for each in self._new]
        self._new.clear()
        fields = [self._numbers.get(text, text) for text in texts]
        return json.dumps([int(self._is_joining), fields], separators=(",", ":"))

    def _process_round(self, texts: list[str]) -> None:
        """Process the announcements of all ranks, in the same way on each of them."""
        for rank, text in enumerate(texts):
            joins, fields = json.loads(text)
            if joins and rank not in self._joined:
                self._joined.append(rank)
            for each in fields:
                request = self._requests[each] if isinstance(each, int) else self._numbered(each)
                self._announced.setdefault(request.name, {})[rank] = request
        perform([*self._agreed()], self._of)
        if len(self._joined) == len(self._of.ranks):
            self._is_joining = False

    def _numbered(self, text: str) -> CollectiveRequest:
        if text not in self._numbers:
            self._numbers[text] = len(self._requests)
            self._requests.append(CollectiveRequest.from_json(json.loads(text)))
        return self._requests[self._numbers[text]]

    def _agreed(self) -> Iterator[AgreedOperation]:
        """Remove and yield the operations that all ranks have issued; mark impossible ones as failed."""
        needed = set(range(len(self._of.ranks))) - {*self._joined}
        ready = [name for name, by_rank in self._announced.items() if needed <= by_rank.keys()]
        for name in ready:
            by_rank = dict(sorted(self._announced.pop(name).items()))
            mine = self._mine.pop(name, None)
            error = disagreement({self._of.ranks[rank]: request for rank, request in by_rank.items()})
            if not error and len(by_rank) < len(self._of.ranks):
                error = unjoinable(next(iter(by_rank.values())))
            if not error:
                yield AgreedOperation(requests=by_rank, mine=mine)
            elif mine is not None:
                mine.error = error


_HEAD = 8
_CAPACITY = 2048
"""Number of bytes of a text sent along with its length; longer texts need a second step."""


class TextExchange:
    """One exchange of texts, which does not block until it is waited for; every rank of the group starts one with its
    own text.

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
        """Return the texts by rank, or None if they have not arrived and `wait` is False.

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
