"""The differences between the values that ranks keep under one name: which parameters, on which ranks, from which
index. In the thread that runs the cell.

Ranks report digests; where these differ, digests of 64 pieces of the first tensor that differs, and so on until one
element is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.system.formatting import rank_list

if TYPE_CHECKING:
    from jupyter_distrib.kernel.session.session import Session

SHOWN = 20
"""Number of differing parameters that are examined and shown."""
_ASK = "from jupyter_distrib.worker.autoparallel.checks import value_digests\nvalue_digests.{call}"
Every = Mapping[int, Mapping[str, Any]]
"""The facts that each rank has reported about each name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One parameter that differs between ranks."""

    name: str
    form: str
    groups: tuple[tuple[tuple[int, ...], str], ...]
    """The ranks with equal values, and a summary of the value: `norm 1.25`."""
    first: str = ""
    """The first place with different elements, and the elements: `[0, 3]: 0.5 | 0.25`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The differences of a kept value between its ranks."""

    name: str
    ranks: tuple[int, ...]
    count: int
    """Number of tensors and numbers in it."""
    found: tuple[Difference, ...]
    left_out: int = 0
    """Number of differing entries that are not listed."""
    sharded: int = 0
    """Number of parameters that were not compared, since each rank holds a different part of them."""

    def __bool__(self) -> bool:
        return bool(self.found)

    def __repr__(self) -> str:
        lines = [self._head()]
        for each in self.found:
            lines.append(f"  {each.name}  {each.form}".rstrip())
            lines += [f"    {rank_list(ranks)}: {text}" for ranks, text in each.groups]
            lines += [f"    first at {each.first}"] if each.first else []
        lines += [f"  ... {self.left_out} more"] if self.left_out else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def _head(self) -> str:
        where = f"on {rank_list(self.ranks)}"
        left = f"; {self.sharded} sharded over the ranks were not compared" if self.sharded else ""
        if not self.found:
            return f"{self.name} is the same {where}: {self.count} tensors and numbers{left}"
        differ = len(self.found) + self.left_out
        return f"{self.name} differs {where}: {differ} of {self.count} tensors and numbers{left}"


def compare(session: Session, handle: RankValue) -> Differences:
    """Return how a kept value differs between its ranks.

    Raises:
        PoolError: It is on one rank only, or all of it is sharded, or the ranks are busy.
        ValueLost: A rank that held it is gone.
    """
    if len(handle.ranks) < 2:
        raise PoolError(f"`{handle.name}` is on {rank_list(handle.ranks)} only: there is nothing to compare it with.")
    every = _ask(session, handle, "summaries(__kept__)")
    names = list(dict.fromkeys(name for values in every.values() for name in values))
    sharded = [
        name for name in names if any(values.get(name, {}).get("kind") == "sharded" for values in every.values())
    ]
    names = [name for name in names if name not in sharded]
    if not names:
        raise PoolError(f"`{handle.name}` is sharded over {rank_list(handle.ranks)}: each rank holds a different part.")
    differing = [name for name in names if len({_key(values.get(name)) for values in every.values()}) > 1]
    shown = differing[:SHOWN]
    firsts = _firsts(session, handle, every, shown)
    return Differences(
        name=handle.name,
        ranks=handle.ranks,
        count=len(names),
        found=tuple(_difference(name, every, firsts.get(name, "")) for name in shown),
        left_out=len(differing) - len(shown),
        sharded=len(sharded),
    )


def _ask(session: Session, handle: RankValue, call: str) -> dict[int, Any]:
    results = session.queries.ask_holders(handle, _ASK.format(call=call))
    return {rank: results[rank] for rank in handle.ranks}


def _key(value: Mapping[str, Any] | None) -> str:
    """Return a text that is equal for equal values."""
    if value is None:
        return ""
    return f"{value['kind']} {value.get('form', '')} {value.get('digest', value.get('text', ''))}"


def _difference(name: str, every: Every, first: str) -> Difference:
    groups: dict[str, list[int]] = {}
    for rank, values in every.items():
        groups.setdefault(_key(values.get(name)), []).append(rank)
    told_of = {key: every[ranks[0]].get(name) for key, ranks in groups.items()}
    forms = {values["form"] for values in told_of.values() if values and "form" in values}
    return Difference(
        name=name or "it",
        form=forms.pop() if len(forms) == 1 else "",
        groups=tuple((tuple(ranks), _holds(told_of[key])) for key, ranks in groups.items()),
        first=first,
    )


def _holds(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "not there"
    if value["kind"] != "tensor":
        return str(value["text"])
    return (
        f"norm {value['norm']:.8g}" if value["norm"] is not None else f"{value['form']}, digest {value['digest'][:6]}"
    )


# ---------------------------------------------------------------------------------------------------- first index


def _firsts(session: Session, handle: RankValue, every: Every, names: Sequence[str]) -> dict[str, str]:
    """Return the first place at which tensors of the same form differ between ranks, with the elements there."""
    spans: dict[str, tuple[int, int]] = {}
    for name in names:
        values = [each.get(name) or {} for each in every.values()]
        if len({each.get("form") for each in values}) == 1 and values[0].get("count"):
            spans[name] = 0, int(values[0]["count"])
    while wide := {name: span for name, span in spans.items() if span[1] - span[0] > 1}:
        answers = _ask(session, handle, f"pieces(__kept__, {wide!r})")
        spans |= {name: _narrowed(span, [each[name] for each in answers.values()]) for name, span in wide.items()}
    places = {name: span[0] for name, span in spans.items()}
    if not places:
        return {}
    elements = _ask(session, handle, f"elements(__kept__, {places!r})")
    return {
        name: f"{_index(place, _shape(every, name))}: {' | '.join(_values(elements, name))}"
        for name, place in places.items()
    }


def _narrowed(span: tuple[int, int], digests: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return the first part of a span in which the ranks differ."""
    first, end = span
    size = -(-(end - first) // len(digests[0]))
    place = next((place for place, each in enumerate(zip(*digests, strict=True)) if len(set(each)) > 1), 0)
    return first + place * size, min(end, first + (place + 1) * size)


def _shape(every: Every, name: str) -> list[int]:
    form = str(next(iter(every.values()))[name]["form"])
    return [int(each) for each in form[1 : form.index("]")].split(",") if each.strip()]


def _index(place: int, shape: Sequence[int]) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.insert(0, rest)
    return index


def _values(elements: Every, name: str) -> list[str]:
    """Return the distinct values, each with its ranks."""
    groups: dict[str, list[int]] = {}
    for rank, parts in elements.items():
        groups.setdefault(f"{parts[name]:.9g}", []).append(rank)
    return [f"{value} ({rank_list(ranks)})" for value, ranks in groups.items()]
