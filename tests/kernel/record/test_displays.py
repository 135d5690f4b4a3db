"""What cells display on ranks, in a real kernel: figures, HTML, updates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.forget()
    shared_notebook.ok(
        "from jupyter_distrib.kernel.session import session as _s\nfrom jupyter_distrib.kernel.views.state import state_of as _state_of\nimport json as _json"
    )
    return shared_notebook


def displays(book: Notebook, rank: int = 0) -> list[dict[str, Any]]:
    """What the last run's record holds of one rank."""
    found = book.ok(f"print(_json.dumps(_state_of(_s.current().history[-1].record)['ranks'][{rank}]['displays']))")
    return list(json.loads(found.stdout))


def test_a_figure_that_is_left_open_is_shown_under_its_rank(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    source = "%%distributed --ranks 2\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, rank])\nNone"
    book.ok(source)
    for rank in (0, 1):
        (figure,) = displays(book, rank)
        assert figure["data"]["image/png"].startswith("iVBOR")
    book.ok("%%distributed --ranks 2\n1")
    assert displays(book) == []


def test_show_in_a_loop_gives_a_figure_each(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    book.ok(
        "%%distributed --ranks 1\nimport matplotlib.pyplot as plt\n"
        "for n in range(3):\n    plt.figure(figsize=(2 + n, 2))\n    plt.plot([n])\n    plt.show()"
    )
    assert len(displays(book)) == 3


def test_figures_of_a_cell_that_fails_are_shown(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    book.fails("%%distributed --ranks 1\nimport matplotlib.pyplot as plt\nplt.plot([1])\n1 / 0")
    assert len(displays(book)) == 1


def test_a_backend_of_the_users_choice_is_left_alone(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    outcome = book.ok(
        "%%distributed --ranks 1 --env MPLBACKEND=svg --fresh\nimport matplotlib.pyplot as plt\nplt.plot([1])\n"
        "plt.get_backend()"
    )
    assert "svg" in outcome.result
    assert displays(book) == []
    book.ok("%distributed_pool stop")


def test_the_notebooks_own_display_works_on_a_rank(book: Notebook) -> None:
    book.ok("from IPython.display import display, HTML")
    outcome = book.ok(
        "%%distributed --ranks 2\ndisplay(HTML(f'<b>bold {rank}</b>'), 'and text')\n"
        "def show():\n    display(HTML('<i>again</i>'))\nshow()"
    )
    assert [each["data"]["text/html"] for each in displays(book, 1)] == ["<b>bold 1</b>", "<i>again</i>"]
    assert "and text" in outcome.view


def test_updates_take_their_place_and_clearing_clears(book: Notebook) -> None:
    book.ok(
        "%%distributed --ranks 1\nfrom IPython.display import clear_output, display, update_display, HTML\n"
        "display(HTML('gone'))\nclear_output()\nhandle = display(HTML('a'), display_id=True)\ndisplay(HTML('b'))\n"
        "handle.update(HTML('c'))\nupdate_display(HTML('d'), display_id=handle.display_id)"
    )
    assert [each["data"]["text/html"] for each in displays(book)] == ["d", "b"]


def test_clearing_takes_what_was_printed_too(book: Notebook) -> None:
    outcome = book.ok(
        "%%distributed --ranks 2\nfrom IPython.display import clear_output, display, HTML\nimport sys\n"
        "for step in range(50):\n    print('step', step, rank)\n    print('error', step, file=sys.stderr)\n"
        "    clear_output(wait=True)\nprint('end of', rank)"
    )
    assert "end of 0" in outcome.view
    assert "end of 1" in outcome.view
    assert "step" not in outcome.view


def test_displays_inside_the_inline_pool_are_the_kernels_own(book: Notebook) -> None:
    outcome = book.ok(
        "%%distributed --ranks 1 --pool inline\nfrom IPython.display import HTML\ndisplay(HTML('<b>here</b>'))"
    )
    assert "text/html" in outcome.kinds


def test_ranks_that_display_nothing_do_not_load_ipython(book: Notebook) -> None:
    outcome = book.ok("%%distributed --ranks 1 --fresh\nimport sys\ndisplay('text')\n'IPython' in sys.modules")
    assert "False" in outcome.result
