"""Whoever holds an old parameter gets the new one: lists, tuples, dicts, sets, attributes, closures, local variables."""

from __future__ import annotations

import gc
from collections import namedtuple
from typing import Any

import torch

from jupyter_distrib.worker.autoparallel.training import replace_references

Pair = namedtuple("Pair", "name tensor")
everywhere: dict[str, Any] = {}


def test_every_holder_gets_the_new_one():
    class Holder:
        pass

    old, new, other = torch.zeros(1), torch.ones(1), torch.zeros(1)
    holder = Holder()
    holder.tensor = old
    values, named, inside = [old, other], [("a", old), ("b", other)], {"deep": [(1, (old,))]}
    pair, chosen, keys = Pair("a", old), {old, other}, {old: "state", other: "no"}
    everywhere["tensor"] = old

    def closure() -> torch.Tensor:
        return caught

    caught = old
    local = old
    replace_references.replace({id(old): (old, new)})

    found = [
        holder.tensor,
        values[0],
        named[0][1],
        inside["deep"][0][1][0],
        pair.tensor,
        everywhere["tensor"],
        closure(),
    ]
    assert all(each is new for each in [*found, local])
    assert new in chosen
    assert old is new  # a local variable, too
    assert [keys[new], keys[other]] == ["state", "no"]
    assert next(iter(keys)) is new
    assert values[1] is other
    assert named[1][1] is other
    assert isinstance(pair, Pair)


def test_nothing_else_is_touched():
    old, new = [torch.zeros(1) for _ in range(2)], [torch.ones(1) for _ in range(2)]
    untouched = [torch.zeros(1), "text", (1, 2)]
    before = [id(each) for each in untouched]
    kept = list(old)

    replace_references.replace({id(a): (a, b) for a, b in zip(kept, new, strict=True)})

    assert [id(each) for each in untouched] == before
    assert all(a is b for a, b in zip(old, new, strict=True))
    gc.collect()
