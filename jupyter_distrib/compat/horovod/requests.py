"""The operations that ranks issue by name, as they describe them to one another, with their results, and the exceptions
that Horovod has for operations that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

NOT_INITIALIZED = "horovod.torch is not ready on this rank: call hvd.init() first."


class HorovodInternalError(RuntimeError):
    """An operation failed because ranks disagree about it or one of them is lost."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of ranks has changed. Never raised here, since changed ranks run the cell again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """The facts of one rank's operation that the other ranks need."""

    kind: str
    """`allreduce`, `allgather`, `broadcast`, `alltoall`, `reducescatter`, `barrier`."""
    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"
    device: str = "cpu"
    op: str = ""
    root: int = -1
    splits: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        return [self.kind, self.name, self.shape, self.dtype, self.device, self.op, self.root, self.splits]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> CollectiveRequest:
        kind, name, shape, dtype, device, op, root, splits = fields
        return cls(
            kind=kind,
            name=name,
            shape=tuple(shape),
            dtype=dtype,
            device=device,
            op=op,
            root=root,
            splits=tuple(splits),
        )

    def zeros(self) -> torch.Tensor:
        """Return the contribution of a rank that has joined."""
        device = self.device if self.device == "cpu" else torch.device(self.device)
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device)


@dataclass(slots=True, kw_only=True, eq=False)
class SubmittedOperation:
    """An operation of this rank, from its call until its result is fetched."""

    request: CollectiveRequest
    tensor: torch.Tensor
    into: torch.Tensor | None = None
    """The tensor that receives the result in place."""
    prescale: float = 1.0
    postscale: float = 1.0
    works: list[Any] = field(default_factory=list)
    finish: Callable[[], Any] | None = None
    """Makes the result once the works are done; None until the ranks have agreed on the operation."""
    error: str = ""

    @property
    def is_agreed(self) -> bool:
        return self.finish is not None or bool(self.error)

    def is_done(self) -> bool:
        return self.is_agreed and all(work.is_completed() for work in self.works)

    def result(self) -> Any:
        """Wait for the works and return the result.

        Raises:
            HorovodInternalError: The ranks disagree, or one is lost.
        """
        if self.error:
            raise HorovodInternalError(self.error)
        assert self.finish is not None
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise HorovodInternalError(f"{self.request.kind} {self.request.name!r} failed: {error}") from error
        return self.finish()


def disagreement(requests: Mapping[int, CollectiveRequest]) -> str:
    """Return the error message if ranks issued different operations under one name, else an empty text."""
    (first, one), *others = requests.items()
    for rank, other in others:
        for what in ("dtype", "device", "op", "root", "shape"):
            mine, theirs = getattr(one, what), getattr(other, what)
            if mine != theirs and not (what == "shape" and _may_differ(one, other)):
                return (
                    f"{one.kind} {one.name!r} differs between ranks: {what} is {mine} on rank {first} and {theirs} on "
                    f"rank {rank}. Give different operations different names."
                )
    return ""


def _may_differ(one: CollectiveRequest, other: CollectiveRequest) -> bool:
    return one.kind in {"allgather", "alltoall"} and one.shape[1:] == other.shape[1:]
