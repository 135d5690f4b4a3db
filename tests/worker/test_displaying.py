"""What `display` sends from a rank."""

from __future__ import annotations

import pytest

from jupyter_distrib.interfaces import identity
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.output import displaying


def test_displaying_text_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    displaying.display("text", [1], metadata={})
    assert capsys.readouterr().out == "text\n[1]\n"


class Shows:
    """Shows itself in one format."""

    def __init__(self, kind: str, content: object) -> None:
        self._bundle = {kind: content, "text/plain": "plain"}

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        return self._bundle


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[displaying.Event]:
    events: list[displaying.Event] = []
    monkeypatch.setattr(identity.cell, "displayer", displaying.Displayer("r-1", 3, events.append))
    return events


def bundles(events: list[displaying.Event]) -> list[dict[str, str]]:
    return [event.data for event in events if isinstance(event, m.Displayed)]


def test_bytes_and_json_travel_as_text(shown: list[displaying.Event]) -> None:
    displaying.display(Shows("image/png", b"\x00\xff"), metadata={"image/png": {"width": 3}})
    displaying.display({"application/json": {"a": [1, 2]}}, raw=True, metadata={"nan": float("nan")})
    displaying.close()
    assert bundles(shown) == [
        {"image/png": "AP8=", "text/plain": "plain"},
        {"application/json": '{"a": [1, 2]}'},
    ]
    assert [event.metadata for event in shown if isinstance(event, m.Displayed)] == [{"image/png": {"width": 3}}, {}]


def test_a_display_that_is_too_large_is_a_sentence(
    shown: list[displaying.Event], capsys: pytest.CaptureFixture[str]
) -> None:
    displaying.display(Shows("text/html", "x" * 12_000_000))
    displaying.display(Shows("text/html", "x" * 12_000_000), display_id="large")
    displaying.close()
    sentence = "A display of 12.0 MB is left out; up to 10.0 MB are shown. Save it to a file, or make it smaller."
    assert capsys.readouterr().out == f"{sentence}\n"
    assert bundles(shown) == [{"text/plain": sentence}]


def test_code_of_a_rank_is_not_for_the_notebook(
    shown: list[displaying.Event], capsys: pytest.CaptureFixture[str]
) -> None:
    displaying.display(Shows("application/javascript", "alert(1)"))
    displaying.close()
    (note,) = shown
    assert isinstance(note, m.Noted)
    assert note.text.startswith("a display of application/javascript is left out")
    assert capsys.readouterr().out == "plain\n"


def test_a_flood_of_updates_becomes_the_newest(shown: list[displaying.Event]) -> None:
    handle = displaying.display(Shows("text/html", "0"), display_id=True)
    for number in range(1, 1001):
        displaying.update_display(Shows("text/html", str(number)), display_id=handle.display_id)
    displaying.close()
    assert len(shown) < 20
    assert bundles(shown)[0]["text/html"] == "0"
    assert bundles(shown)[-1]["text/html"] == "1000"
    assert not isinstance(shown[0], m.Cleared)
    assert not shown[0].update


def test_clearing_with_wait_keeps_the_old_until_there_is_something_new(shown: list[displaying.Event]) -> None:
    displaying.display(Shows("text/html", "old"))
    displaying.clear_output(wait=True)
    assert len(shown) == 1
    displaying.display(Shows("text/html", "new"))
    displaying.close()
    assert [type(event) for event in shown] == [m.Displayed, m.Cleared, m.Displayed]


def test_clearing_takes_back_what_is_on_its_way(shown: list[displaying.Event]) -> None:
    for number in range(5):
        displaying.display(Shows("text/html", str(number)))
    displaying.clear_output()
    displaying.close()
    assert isinstance(shown[-1], m.Cleared)
    assert len(bundles(shown)) <= 2
