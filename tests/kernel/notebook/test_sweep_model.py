"""What the widget of a sweep is told."""

from __future__ import annotations

import json

from jupyter_distrib.kernel.notebook.sweep_model import state_of
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.run_table import RunRow
from jupyter_distrib.wire import messages as m


def a_row(run: str, lr: str, losses: list[float], state: str = "running") -> RunRow:
    record = RunRecord(run=run, label="Cell In[5]", ranks=[0], world_size=1)
    record.apply(m.Started(run=run, rank=0, pid=1, device="cpu", at_s=1.0))
    for step, loss in enumerate(losses):
        record.apply(m.Measured(run=run, rank=0, step=step, values={"loss": loss}, at_s=2.0 + step))
    return RunRow(run=run, label="Cell In[5]", state=state, elapsed_s=9.0, record=record, swept={"lr": lr})


def test_the_best_is_on_top_and_lines_keep_their_places() -> None:
    rows = [a_row("a-1", "0.3", [3.0, 2.0]), a_row("a-2", "0.1", [1.0, 0.5], "done"), a_row("a-3", "0.2", [])]
    state = state_of(rows)

    assert [(row["run"], row["place"], row["texts"]) for row in state["rows"]] == [
        ("a-2", 1, {"loss": "0.5"}), ("a-1", 0, {"loss": "2"}), ("a-3", 2, {}),
    ]  # fmt: skip
    assert state["labels"] == ["lr=0.3", "lr=0.1", "lr=0.2"]
    assert (state["names"], state["metrics"], state["metric"]) == (["lr"], ["loss"], "loss")
    assert [each["columns"] and each["columns"]["=loss"] for each in state["ranks"]] == [[3.0, 2.0], [1.0, 0.5], None]
    assert [row["ended"] for row in state["rows"]] == [True, False, False]


def test_a_run_that_waits_or_became_nan_can_be_told_too() -> None:
    rows = [a_row("a-1", "<b>", [1.0, float("nan")]), a_row("a-2", "2", [], "queued, place 1")]
    state = json.loads(json.dumps(state_of(rows), allow_nan=False))

    assert [(row["swept"]["lr"], row["numbers"], row["waits"]) for row in state["rows"]] == [
        ("<b>", {"loss": None}, False), ("2", {}, True),
    ]  # fmt: skip
    assert state["ranks"][0]["columns"]["=loss"] == [1.0, "nan"]
