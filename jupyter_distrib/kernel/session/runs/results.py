"""The results of a run: the value of every rank, and handles to values that stay on the ranks. Kernel side.

`Results` is what a cell evaluates to. `RankValue` stands in the notebook for a name that was kept with `--keep`: the
value itself lives in the ranks' processes. `ReturnedValues` are received in the pool's own thread, and unpacked by the
thread that asks for them.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from html import escape
from typing import Any, NoReturn, overload

from jupyter_distrib.errors import ValueLost
from jupyter_distrib.serialization import exceptions, payload
from jupyter_distrib.system import interrupts
from jupyter_distrib.system.formatting import rank_list, size
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

REPR_CHARACTERS = 600


class Results:
    """The value of each rank, indexed by the rank's number even if the run had only some of the ranks; immutable.

    `results[3]` is rank 3's value, `results[-1]` the last rank's, `results[:2]` a list of the values below rank 2.
    Iteration and comparison with a list go over the values in the order of ranks.
    """

    __slots__ = ("__weakref__", "_values", "run")
    __hash__ = None  # type: ignore[assignment]  # the values need not be hashable, and equality is by value

    def __init__(self, values: Mapping[int, Any]) -> None:
        self._values = dict(sorted(values.items()))
        self.run = ""
        """Id of the run that produced these values, in the kernel that started it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._values)

    def values(self) -> list[Any]:
        return list(self._values.values())

    def items(self) -> list[tuple[int, Any]]:
        return list(self._values.items())

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __reversed__(self) -> Iterator[Any]:
        return iter(self.values()[::-1])

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        end = max(self._values, default=-1) + 1
        if isinstance(rank, slice):
            return [self._values[each] for each in range(end)[rank] if each in self._values]
        number = operator.index(rank)
        try:
            return self._values[number + end if number < 0 else number]
        except KeyError:
            ranks = rank_list(self._values) if self._values else "no rank"
            raise IndexError(f"there is no value of rank {number}: the results are of {ranks}") from None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Results):
            return self._values == other._values
        return self.values() == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self._values,)

    def __repr__(self) -> str:
        lines = []
        for ranks, text, _ in self._shown():
            name = f"{rank_list(ranks)}: "
            lines.append(name + text.replace("\n", "\n" + " " * len(name)))
        return "\n".join(lines) or "no values"

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><td><b>{rank_list(ranks)}</b></td><td>{html or f'<pre>{escape(text)}</pre>'}</td></tr>"
            for ranks, text, html in self._shown()
        )
        return f"<table>{''.join(rows)}</table>"

    def _shown(self) -> list[tuple[list[int], str, str]]:
        """Return ranks, text and markup ("" if none) of each value; ranks with equal-looking values share an entry."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, value in self._values.items():
            groups.setdefault((short_text(value), _html(value)), []).append(rank)
        return [(ranks, text, html) for (text, html), ranks in groups.items()]


def short_text(value: object) -> str:
    """Return the `repr` of a value, shortened in the middle if it is long."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - foreign code
        return f"<{type(value).__name__}; its repr raised {type(error).__name__}>"
    if len(text) <= REPR_CHARACTERS:
        return text
    half = REPR_CHARACTERS // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} more characters) ... {text[-half:]}"


def _html(value: object) -> str:
    # A class itself has the method too, but unbound.
    method = None if isinstance(value, type) else getattr(value, "_repr_html_", None)
    try:
        return str(method() or "") if callable(method) else ""
    except Exception:  # noqa: BLE001 - foreign code
        return ""


class RankValue:
    """The notebook's handle to a name that was kept on ranks: `model[0]` fetches rank 0's copy.

    In a `%%distributed` cell on the same pool the name means the rank's own value. When the last handle to it is
    garbage collected, the ranks may drop their values.

    Args:
        key: The key of the value in the worker group.
        type_names: Rank -> name of the value's type, if it is known.
        size_bytes: Rank -> size of the tensors in its value, if they are large.
        pool: The pool's name in the repr: `local`.
        since: The label of the cell that kept it: `Cell In[3]`.
        sharded: Whether no rank has all of it; then `handle[rank]` fetches the whole value for any rank.
        fetch: Returns a copy of one rank's value; called by `handle[rank]` in the caller's thread.
        on_drop: Called with `key` when the handle is collected, which may be in any thread and in the middle of
            anything: it must neither wait nor take a lock.
    """

    def __init__(
        self,
        *,
        name: str,
        key: str,
        group: str,
        ranks: Iterable[int],
        type_names: Mapping[int, str] | None = None,
        size_bytes: Mapping[int, int] | None = None,
        pool: str = "",
        since: str = "",
        sharded: bool = False,
        fetch: Callable[[int], Any],
        on_drop: Callable[[str], object] | None = None,
    ) -> None:
        self.name = name
        self.key = key
        self.group = group
        self.ranks = tuple(sorted(ranks))
        self.type_names = dict(type_names or {})
        self.size_bytes = dict(size_bytes or {})
        self.sharded = sharded
        self.lost: frozenset[int] = frozenset()
        """The ranks whose copy is lost."""
        self.replaced: tuple[weakref.ref[Any], ...] = ()
        """The notebook's own value of this name before the handle, and the parameters of a model."""
        self.classes: Any = None
        """The notebook's classes that the value may have, as `KeptClasses`; None if there are none."""
        self._pool = pool
        self._since = since
        self._fetch = fetch
        if on_drop is not None:
            # At exit the ranks end anyway.
            weakref.finalize(self, on_drop, key).atexit = False

    def mark_lost(self, ranks: Iterable[int]) -> None:
        """Record that the copies of these ranks are lost."""
        self.lost = self.lost | (frozenset(ranks) & frozenset(self.ranks))

    def __getitem__(self, rank: int) -> Any:
        """Return a copy of a rank's value.

        Raises:
            TypeError: This is no number of a rank, but a key or a position in the value.
            IndexError: The name was not kept on that rank.
            ValueLost: The rank's process is gone.
        """
        if not hasattr(type(rank), "__index__") or getattr(rank, "ndim", False):  # arrays have an `__index__` as well
            raise TypeError(self._advice)
        if rank not in self.ranks:
            raise IndexError(f"`{self.name}` was not kept on rank {rank}: it is on {rank_list(self.ranks)}")
        if rank in self.lost or (self.sharded and self.lost):
            raise ValueLost(
                f"`{self.name}` of {rank_list(self.lost)} is gone with the process that held it: "
                f"run {self._since or 'the cell that made it'} again"
            )
        return self._fetch(rank)

    @property
    def _advice(self) -> str:
        first = self.ranks[0] if self.ranks else 0
        return (
            f"`{self.name}` lives on the ranks: use {self.name}[{first}] to fetch rank {first}'s copy, "
            "or read it in a %%distributed cell"
        )

    def __getattr__(self, attribute: str) -> NoReturn:
        # IPython and pickle ask for many underscored names; they get the usual answer.
        if attribute.startswith("_"):
            raise AttributeError(f"'RankValue' object has no attribute {attribute!r}")
        raise AttributeError(self._advice)

    def __setattr__(self, attribute: str, value: object) -> None:
        if attribute not in _ATTRIBUTES.split():
            raise AttributeError(self._advice)
        object.__setattr__(self, attribute, value)

    def __format__(self, form: str) -> str:
        if form:
            raise TypeError(self._advice)
        return repr(self)

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse operations of torch; torch finds handles among the arguments, also in lists of them."""
        given = [*args, *(kwargs or {}).values()]
        for each in given:
            if isinstance(each, cls):
                raise TypeError(each._advice)  # noqa: SLF001 - of this class
            if isinstance(each, (list, tuple)):
                given += each
        raise TypeError(f"{function} was given a value that lives on the ranks")

    def __copy__(self) -> RankValue:
        return self

    def __deepcopy__(self, memo: object) -> RankValue:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        from jupyter_distrib.serialization.payload import kept_value  # a heavy import that only this needs

        return kept_value, (self.key,)

    def __repr__(self) -> str:
        types = " or ".join(dict.fromkeys(self.type_names.values())) or "a value"
        details = ["sharded"] if self.sharded else []
        if largest := max(self.size_bytes.values(), default=0):
            each = "" if len(self.ranks) == 1 else " each" if min(self.size_bytes.values()) == largest else " at most"
            details.append(f"{size(largest)} of tensors{each}")
        details += [f"{self._pool} pool"] if self._pool else []
        details += [f"kept since {self._since}"] if self._since else []
        details += [f"gone on {rank_list(self.lost)}"] if self.lost else []
        return f"{self.name}: {types} on {rank_list(self.ranks)}" + (f" ({', '.join(details)})" if details else "")


_ATTRIBUTES = """
    name key group ranks type_names size_bytes sharded lost replaced classes _pool _since _fetch
"""
"""The attributes of handles; other assignments are meant for the value."""

_OPERATIONS = """
    call iter len bool contains setitem delitem enter array int float complex index round neg pos abs invert
    lt le gt ge add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow
    and rand or ror xor rxor
"""
"""Methods by which a notebook uses its own values; without `eq`, by which dicts and IPython compare."""


def _refuse(self: RankValue, *_: object, **__: object) -> NoReturn:
    raise TypeError(self._advice)


for _operation in _OPERATIONS.split():
    setattr(RankValue, f"__{_operation}__", _refuse)


class ReturnedValues:
    """The values returned by the ranks of one run. Owns the descriptors that came with them."""

    def __init__(self) -> None:
        self.held: object = ()
        """The kernel's classes and functions that were sent, kept alive until the values have arrived."""
        self._parcels: dict[int, tuple[m.Parcel, Descriptors]] = {}
        self._results: Results | None = None
        self._unpacking = threading.RLock()
        """Held while values are unpacked: the thread that shows a detached run and the notebook may ask at once."""

    @property
    def are_none(self) -> bool:
        """Return whether no value is left to unpack."""
        return not self._parcels

    def keep_value(self, event: m.RunEvent, descriptors: Descriptors) -> m.RunEvent:
        """Keep the event's value, and return the event without it. Owns the descriptors."""
        if isinstance(event, m.Returned) and event.value is not None:
            self._parcels[event.rank] = event.value, descriptors
            return replace(event, value=None)
        if isinstance(event, m.Restarted):
            self._close_parcels()
        descriptors.close()
        return event

    def unpacked(self, returned: Iterable[int], *, keep: bool) -> Results:
        """Unpack the values of these ranks, once, and return them. Raises `OSError` if too many files are open.

        Args:
            returned: The ranks that have returned.
            keep: Whether to keep the results for further calls.
        """
        with self._unpacking:
            if self._results is not None:
                return self._results
            values: dict[int, Any] = dict.fromkeys(returned)
            for rank, (parcel, descriptors) in self._parcels.items():
                copy = Descriptors.duplicates(descriptors).take_one()  # a call that is interrupted can be made again
                values[rank] = payload.unpack_value(*payload.from_parcel(parcel, copy))
            self._close_parcels()
            results = Results(values)
            self._results = results if keep else None
            return results

    def _close_parcels(self) -> None:
        while self._parcels:
            _, (_, descriptors) = self._parcels.popitem()
            descriptors.close()

    def __del__(self) -> None:
        try:
            with interrupts.Uninterrupted():
                self._close_parcels()
        except KeyboardInterrupt:  # which the extension repeats, since Python swallows it here
            self._close_parcels()
            raise


def unpack_exception(parcel: m.Parcel) -> BaseException | None:
    return exceptions.unpack_exception(*payload.from_parcel(parcel, None))
