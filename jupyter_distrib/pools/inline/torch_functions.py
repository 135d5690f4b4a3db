"""The functions of `torch.distributed` for inline ranks: the values that each collective gives, takes and moves.
Called while a cell runs that has imported torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jupyter_distrib.pools.inline.collectives import Call, Collectives, Group, fill

Moved = list[tuple[int, int, Any]]


@contextmanager
def in_place_of_torch(ranks: Collectives) -> Iterator[None]:
    """Make `torch.distributed` work for these ranks, within the block."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    ours = TorchFunctions(ranks).by_name()
    before = [
        (module, name, getattr(module, name))
        for module in (dist, distributed_c10d)
        for name in ours
        if hasattr(module, name)
    ]
    for module, name, _ in before:
        setattr(module, name, ours[name])
    try:
        yield
    finally:
        for module, name, theirs in before:
            setattr(module, name, theirs)


class TorchFunctions:
    """The functions of one run, with the names and parameters of those in `torch.distributed`."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Return all functions that replace torch's."""
        named = {name: getattr(self, name) for name in vars(TorchFunctions) if not name.startswith("_")}
        world = self._ranks.group(None)
        del named["by_name"]
        return named | {
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "init_process_group": lambda *args, **more: None,
            "destroy_process_group": lambda group=None: None,
            "get_backend": lambda group=None: "inline",
            "get_rank": lambda group=None: (group or world).rank(),
            "get_world_size": lambda group=None: (group or world).size(),
            "get_process_group_ranks": lambda group=None: list((group or world).ranks),
            "new_group": lambda members=None, *args, **more: self._ranks.group(more.get("ranks", members)),
        }

    def all_reduce(self, tensor: Any, op: Any = None, group: Group | None = None, async_op: bool = False) -> Any:
        name = _named(op)

        def move(calls: list[Call]) -> Moved:
            total = _reduced([call.gives[0] for call in calls], name)
            for call in calls:
                fill(call.takes[0], total)
            return _all_to_all(calls, lambda source, _: calls[source].gives[0])

        return self._ranks.meet(
            "all_reduce", group, gives=[tensor], takes=[tensor], detail=name, later=async_op, move=move
        )

    def reduce(  # noqa: PLR0917 - torch's parameters
        self,
        tensor: Any,
        dst: int | None = None,
        op: Any = None,
        group: Group | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        name, target = _named(op), _place(self._ranks, group, dst, group_dst)

        def move(calls: list[Call]) -> Moved:
            fill(calls[target].takes[0], _reduced([call.gives[0] for call in calls], name))
            return [(source, target, call.gives[0]) for source, call in enumerate(calls)]

        detail = f"{name}, to rank {_rank(self._ranks, group, target)}"
        return self._ranks.meet(
            "reduce", group, gives=[tensor], takes=[tensor], detail=detail, later=async_op, move=move
        )

    def broadcast(
        self,
        tensor: Any,
        src: int | None = None,
        group: Group | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        source = _place(self._ranks, group, src, group_src)

        def move(calls: list[Call]) -> Moved:
            for call in calls:
                fill(call.takes[0], calls[source].gives[0])
            return [(source, target, calls[source].gives[0]) for target in range(len(calls))]

        detail = f"from rank {_rank(self._ranks, group, source)}"
        return self._ranks.meet(
            "broadcast", group, gives=[tensor], takes=[tensor], detail=detail, later=async_op, move=move
        )

    def scatter(  # noqa: PLR0917 - torch's parameters
        self,
        tensor: Any,
        scatter_list: Sequence[Any] | None = None,
        src: int | None = None,
        group: Group | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        source = _place(self._ranks, group, src, group_src)

        def move(calls: list[Call]) -> Moved:
            for call, thing in zip(calls, calls[source].gives, strict=True):
                fill(call.takes[0], thing)
            return [(source, target, thing) for target, thing in enumerate(calls[source].gives)]

        detail = f"from rank {_rank(self._ranks, group, source)}"
        return self._ranks.meet(
            "scatter", group, gives=scatter_list or (), takes=[tensor], detail=detail, later=async_op, move=move
        )

    def gather(  # noqa: PLR0917 - torch's parameters
        self,
        tensor: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        group: Group | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        target = _place(self._ranks, group, dst, group_dst)

        def move(calls: list[Call]) -> Moved:
            for call, place in zip(calls, calls[target].takes, strict=True):
                fill(place, call.gives[0])
            return [(source, target, call.gives[0]) for source, call in enumerate(calls)]

        detail = f"to rank {_rank(self._ranks, group, target)}"
        return self._ranks.meet(
            "gather", group, gives=[tensor], takes=gather_list or (), detail=detail, later=async_op, move=move
        )

    def all_gather(
        self, tensor_list: Sequence[Any], tensor: Any, group: Group | None = None, async_op: bool = False
    ) -> Any:
        return self._ranks.meet("all_gather", group, gives=[tensor], takes=tensor_list, later=async_op, move=_gathered)

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, group: Group | None = None, async_op: bool = False
    ) -> Any:
        parts = _parts(self._ranks, group, output_tensor, input_tensor.shape)
        return self._ranks.meet(
            "all_gather_into_tensor", group, gives=[input_tensor], takes=parts, later=async_op, move=_gathered
        )

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: Any = None,
        group: Group | None = None,
        async_op: bool = False,
        _name: str = "reduce_scatter",
    ) -> Any:
        name = _named(op)

        def move(calls: list[Call]) -> Moved:
            for place, call in enumerate(calls):
                fill(call.takes[0], _reduced([each.gives[place] for each in calls], name))
            return _all_to_all(calls, lambda source, target: calls[source].gives[target])

        return self._ranks.meet(_name, group, gives=input_list, takes=[output], detail=name, later=async_op, move=move)

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,  # noqa: A002
        op: Any = None,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Any:
        parts = _parts(self._ranks, group, input, output.shape)
        return self.reduce_scatter(output, parts, op, group, async_op, "reduce_scatter_tensor")

    def all_to_all(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_list: Sequence[Any],
        group: Group | None = None,
        async_op: bool = False,
        _name: str = "all_to_all",
    ) -> Any:
        def move(calls: list[Call]) -> Moved:
            for target, call in enumerate(calls):
                for source, place in enumerate(call.takes):
                    fill(place, calls[source].gives[target])
            return _all_to_all(calls, lambda source, target: calls[source].gives[target])

        return self._ranks.meet(
            _name, group, gives=input_tensor_list, takes=output_tensor_list, later=async_op, move=move
        )

    def all_to_all_single(  # noqa: PLR0917 - torch's parameters
        self,
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Any:
        count = (group or self._ranks.group(None)).size()
        outputs, inputs = (
            list(tensor.split(list(sizes) if sizes else tensor.shape[0] // count))
            for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes))
        )
        return self.all_to_all(outputs, inputs, group, async_op, "all_to_all_single")

    def barrier(self, group: Group | None = None, async_op: bool = False, device_ids: object = None) -> Any:
        return self._ranks.meet("barrier", group, later=async_op, move=lambda calls: [])

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Group | None = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        source = _place(self._ranks, group, src, group_src)

        def move(calls: list[Call]) -> Moved:
            for call in calls:
                call.takes[0][:] = calls[source].gives[0]
            return [(source, target, calls[source].gives[0]) for target in range(len(calls))]

        detail = f"from rank {_rank(self._ranks, group, source)}"
        self._ranks.meet(
            "broadcast_object_list", group, gives=[object_list], takes=[object_list], detail=detail, move=move
        )

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Group | None = None) -> None:
        def move(calls: list[Call]) -> Moved:
            for call in calls:
                call.takes[0][:] = [each.gives[0] for each in calls]
            return _all_to_all(calls, lambda source, _: calls[source].gives[0])

        self._ranks.meet("all_gather_object", group, gives=[obj], takes=[object_list], move=move)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Group | None = None,
        group_dst: int | None = None,
    ) -> None:
        target = _place(self._ranks, group, dst, group_dst)

        def move(calls: list[Call]) -> Moved:
            calls[target].takes[0][:] = [call.gives[0] for call in calls]
            return [(source, target, call.gives[0]) for source, call in enumerate(calls)]

        takes = [] if object_gather_list is None else [object_gather_list]
        detail = f"to rank {_rank(self._ranks, group, target)}"
        self._ranks.meet("gather_object", group, gives=[obj], takes=takes, detail=detail, move=move)

    def isend(
        self,
        tensor: Any,
        dst: int | None = None,
        group: Group | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Any:
        return self._ranks.send(tensor, _rank(self._ranks, group, _place(self._ranks, group, dst, group_dst)), tag)

    def irecv(
        self,
        tensor: Any,
        src: int | None = None,
        group: Group | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Any:
        anyone = src is None and group_src is None
        return self._ranks.receive(
            tensor, -1 if anyone else _rank(self._ranks, group, _place(self._ranks, group, src, group_src)), tag
        )

    def send(self, *args: Any, **more: Any) -> None:
        self.isend(*args, **more).wait()

    def recv(self, *args: Any, **more: Any) -> None:
        self.irecv(*args, **more).wait()

    def batch_isend_irecv(self, p2p_op_list: Sequence[Any]) -> list[Any]:
        return [
            (self.isend if each.op in (self.isend, self.send) else self.irecv)(
                each.tensor, each.peer, each.group, each.tag
            )
            for each in p2p_op_list
        ]


_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda each: each.sum(0),
    "avg": lambda each: each.sum(0) / len(each),
    "product": lambda each: each.prod(0),
    "min": lambda each: each.amin(0),
    "max": lambda each: each.amax(0),
}


def _named(op: Any) -> str:
    """Return the name of a `ReduceOp`. Raises `NotImplementedError`."""
    from torch.distributed import ReduceOp

    for name in _REDUCTIONS:
        if op is None or op == getattr(ReduceOp, name.upper()):
            return name
    raise NotImplementedError(f"inline ranks reduce by {', '.join(_REDUCTIONS)}; for {op} use --pool local.")


def _reduced(things: Sequence[Any], name: str) -> Any:
    import torch

    return _REDUCTIONS[name](torch.stack([each.detach() for each in things])).to(things[0].dtype)


def _gathered(calls: list[Call]) -> Moved:
    for call in calls:
        for place, each in zip(call.takes, calls, strict=True):
            fill(place, each.gives[0])
    return _all_to_all(calls, lambda source, _: calls[source].gives[0])


def _all_to_all(calls: list[Call], thing: Callable[[int, int], Any]) -> Moved:
    places = range(len(calls))
    return [(source, target, thing(source, target)) for source in places for target in places]


def _parts(ranks: Collectives, group: Group | None, tensor: Any, shape: Sequence[int]) -> list[Any]:
    """Return the parts of a tensor that belong to the members of the group, each of this shape, as views."""
    count = (group or ranks.group(None)).size()
    return [part.view(shape) for part in tensor.view(count, -1)]


def _place(ranks: Collectives, group: Group | None, rank: int | None, place: int | None) -> int:
    """Return a rank's index in the group, given its number or its index."""
    if place is not None:
        return place
    members = (group or ranks.group(None)).ranks
    number = 0 if rank is None else rank
    if number not in members:
        raise ValueError(f"rank {number} is not in the group of ranks {', '.join(map(str, members))}")
    return members.index(number)


def _rank(ranks: Collectives, group: Group | None, place: int) -> int:
    return (group or ranks.group(None)).ranks[place]
