"""Data classes that share how they are compared and shown."""

from __future__ import annotations

import pickle
from dataclasses import field, replace

import pytest

from jupyter_distrib.system.data_class import data_class


@data_class
class Place:
    name: str
    port: int = 1
    key: str = field(default="", repr=False)
    read: list[int] = field(default_factory=list, init=False, compare=False, repr=False)


@data_class
class Named:
    name: str

    def __repr__(self) -> str:
        return self.name


def test_equal_values_are_equal_and_have_one_hash() -> None:
    one, same = Place(name="a", key="k"), replace(Place(name="a"), key="k")
    same.read.append(1)
    assert one == same
    assert hash(one) == hash(same)
    assert one != replace(one, port=2)
    assert one != Named(name="a")
    assert pickle.loads(pickle.dumps(one)) == one


def test_what_is_hidden_is_not_shown_and_an_own_text_stays() -> None:
    assert repr(Place(name="a", key="secret")) == "Place(name='a', port=1)"
    assert repr(Named(name="a")) == "a"


def test_other_attributes_and_positions_are_refused() -> None:
    with pytest.raises(TypeError):
        Place("a")  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Place(name="a").other = 1  # type: ignore[attr-defined]
