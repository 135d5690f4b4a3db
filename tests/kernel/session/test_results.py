"""What a run gives back."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from jupyter_distrib.errors import ValueLost
from jupyter_distrib.kernel.session.runs.results import RankValue, Results


class _Styled:
    def __repr__(self) -> str:
        return "styled"

    def _repr_html_(self) -> str:
        return "<b>styled</b>"


class _Broken:
    def __repr__(self) -> str:
        raise ValueError("no")

    def _repr_html_(self) -> str:
        raise ValueError("no")


# ---------------------------------------------------------------------------------------------------- Results


def test_results_are_indexed_by_rank_also_on_a_part_of_the_ranks() -> None:
    results = Results({3: "c", 2: "b"})
    assert (results[2], results[3], results[-1], results.ranks) == ("b", "c", "c", (2, 3))


def test_a_rank_that_is_not_there_is_refused_by_naming_those_that_are() -> None:
    with pytest.raises(IndexError, match="no value of rank 0: the results are of ranks 2-3"):
        Results({2: "b", 3: "c"})[0]
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        Results({2: "b"})["loss"]  # type: ignore[call-overload]


def test_slices_are_lists_by_rank() -> None:
    results = Results({2: "b", 3: "c", 5: "e"})
    assert (results[:], results[:4], results[3:], results[:2]) == (["b", "c", "e"], ["b", "c"], ["c", "e"], [])


def test_iteration_goes_over_values_in_the_order_of_ranks() -> None:
    results = Results({1: "b", 0: "a"})
    assert (list(results), len(results), results.values(), results.items()) == (
        ["a", "b"], 2, ["a", "b"], [(0, "a"), (1, "b")],
    )  # fmt: skip
    assert (list(reversed(results)), "b" in results) == (["b", "a"], True)


def test_results_equal_a_list_of_their_values() -> None:
    results = Results({0: 1, 1: 2})
    assert results == [1, 2]
    assert results == Results({0: 1, 1: 2})
    assert results != Results({1: 1, 2: 2})
    assert results != [1]
    assert results != "12"


def test_results_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        Results({0: 1})[0] = 2  # type: ignore[index]


def test_results_pickle() -> None:
    assert pickle.loads(pickle.dumps(Results({2: [1], 3: [2]}))) == Results({2: [1], 3: [2]})


def test_the_repr_folds_what_looks_the_same() -> None:
    assert repr(Results(dict.fromkeys(range(8), 0.93))) == "ranks 0-7: 0.93"
    assert repr(Results({0: 1, 1: 2, 2: 1})) == "ranks 0, 2: 1\nrank 1: 2"


def test_the_repr_cuts_long_values_and_indents_further_lines() -> None:
    text = repr(Results({0: "x" * 10_000}))
    assert len(text) < 700
    assert "(9,402 more characters)" in text
    lined = type("Lined", (), {"__repr__": lambda self: "a\nb"})()
    assert repr(Results({0: lined})) == "rank 0: a\n        b"


def test_a_value_whose_repr_fails_does_not_hide_the_others() -> None:
    results = Results({0: _Broken(), 1: 5})
    assert repr(results) == "rank 0: <_Broken; its repr raised ValueError>\nrank 1: 5"
    assert "<pre>5</pre>" in results._repr_html_()


def test_the_table_uses_the_values_own_markup_and_escapes_the_rest() -> None:
    html = Results({0: _Styled(), 1: "<script>", 2: _Styled})._repr_html_()
    assert "<tr><td><b>rank 0</b></td><td><b>styled</b></td></tr>" in html
    assert "<pre>&#x27;&lt;script&gt;&#x27;</pre>" in html
    assert html.count("<b>styled") == 1


# ---------------------------------------------------------------------------------------------------- RankValue


def a_value(**changes: Any) -> RankValue:
    given: dict[str, Any] = {
        "name": "model",
        "key": "k-1",
        "group": "c-1",
        "ranks": (0, 1),
        "type_names": {0: "Net", 1: "Net"},
        "pool": "local",
        "since": "Cell In[3]",
        "fetch": lambda rank: f"copy of {rank}",
    }
    return RankValue(**{**given, **changes})


def test_a_kept_value_says_where_it_lives() -> None:
    assert repr(a_value()) == "model: Net on ranks 0-1 (local pool, kept since Cell In[3])"
    assert repr(a_value(type_names=None, pool="", since="")) == "model: a value on ranks 0-1"


def test_a_kept_value_is_fetched_by_rank() -> None:
    assert a_value()[1] == "copy of 1"
    assert [a_value()[rank] for rank in a_value().ranks] == ["copy of 0", "copy of 1"]


def test_a_rank_without_the_value_is_refused() -> None:
    with pytest.raises(IndexError, match="`model` was not kept on rank 5: it is on ranks 0-1"):
        a_value()[5]


def test_a_lost_value_says_on_which_ranks_and_what_to_do() -> None:
    value = a_value()
    value.mark_lost((1, 7))
    assert value[0] == "copy of 0"
    with pytest.raises(
        ValueLost, match=r"`model` of rank 1 is gone with the process that held it: run Cell In\[3\] again"
    ):
        value[1]
    assert repr(value).endswith("kept since Cell In[3], gone on rank 1)")


def test_an_attribute_of_the_value_is_answered_with_how_to_get_it() -> None:
    with pytest.raises(AttributeError, match=r"`model` lives on the ranks: use model\[0\] to fetch rank 0's copy"):
        a_value().weight  # noqa: B018


@pytest.mark.parametrize(
    "use",
    [
        "model(1)",
        "model.training = False",
        "model['weight']",
        "model[np.arange(2)]",
        "model[:, 0]",
        "model['lr'] = 1",
        "list(model)",
        "len(model)",
        "bool(model)",
        "'a' in model",
        "float(model)",
        "range(model)",
        "round(model, 2)",
        "f'{model:.2f}'",
        "model < 1",
        "1 - model",
        "np.array(model)",
        "np.ones(2) * model",
        "np.asarray(model, float)",
        "torch.tensor(model)",
        "torch.ones(2) @ model",
        "model + torch.ones(2)",
        "torch.cat([torch.ones(2), model])",
        "torch.nn.functional.relu(input=model)",
        "torch.nn.Linear(2, 2)(model)",
    ],
)
def test_using_a_handle_as_the_value_is_answered_with_how_to_get_it(use: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"^`model` .* use model\[0\]"):
        exec(use, {"model": a_value(), "np": np, "torch": torch})


def test_a_handle_is_compared_and_formatted_as_any_object() -> None:
    value = a_value()
    assert value in [1, value]
    assert f"{value}" == repr(value)
    assert {value: 1}[value] == 1


def test_what_ipython_and_pickle_ask_for_is_simply_not_there() -> None:
    value = a_value()
    assert not hasattr(value, "_repr_html_")
    assert not hasattr(RankValue.__new__(RankValue), "_fetch")


def test_a_copy_is_the_handle_itself() -> None:
    value = a_value()
    assert copy.copy(value) is value
    assert copy.deepcopy([value])[0] is value


def test_the_drop_is_reported_when_the_last_handle_is_gone() -> None:
    dropped: list[str] = []
    value = a_value(on_drop=dropped.append)
    assert dropped == []
    del value
    gc.collect()
    assert dropped == ["k-1"]


def test_pickling_a_handle_gives_the_ranks_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = types.ModuleType("jupyter_distrib.serialization.payload")
    payload.kept_value = lambda key: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jupyter_distrib.serialization.payload", payload)
    monkeypatch.setattr("jupyter_distrib.serialization.payload", payload, raising=False)
    assert a_value().__reduce__() == (payload.kept_value, ("k-1",))
