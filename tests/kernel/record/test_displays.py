"""What cells display on ranks, in a real kernel: figures, HTML, updates."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.forget()
    shared_notebook.ok(
        dedent("""\
            from jupyter_distrib.kernel.session import session as _s
            from jupyter_distrib.kernel.views.state import state_of as _state_of
            import json as _json""")
    )
    return shared_notebook


def displays(book: Notebook, rank: int = 0) -> list[dict[str, Any]]:
    """What the last run's record holds of one rank."""
    found = book.ok(f"print(_json.dumps(_state_of(_s.current().history[-1].record)['ranks'][{rank}]['displays']))")
    return list(json.loads(found.stdout))


def test_a_figure_that_is_left_open_is_shown_under_its_rank(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    source = dedent("""\
        %%distributed --ranks 2
        import matplotlib.pyplot as plt
        plt.plot([1, 2, rank])
        None""")
    book.ok(source)
    for rank in (0, 1):
        (figure,) = displays(book, rank)
        assert figure["data"]["image/png"].startswith("iVBOR")
    book.ok("%%distributed --ranks 2\n1")
    assert displays(book) == []


def test_show_in_a_loop_gives_a_figure_each(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    book.ok(
        dedent("""\
            %%distributed --ranks 1
            import matplotlib.pyplot as plt
            for n in range(3):
                plt.figure(figsize=(2 + n, 2))
                plt.plot([n])
                plt.show()""")
    )
    assert len(displays(book)) == 3


def test_figures_of_a_cell_that_fails_are_shown(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    book.fails(
        dedent("""\
            %%distributed --ranks 1
            import matplotlib.pyplot as plt
            plt.plot([1])
            1 / 0""")
    )
    assert len(displays(book)) == 1


def test_a_backend_of_the_users_choice_is_left_alone(book: Notebook) -> None:
    pytest.importorskip("matplotlib")
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 1 --env MPLBACKEND=svg --fresh
            import matplotlib.pyplot as plt
            plt.plot([1])
            plt.get_backend()""")
    )
    assert "svg" in outcome.result
    assert displays(book) == []
    book.ok("%distributed_pool stop")


def test_the_notebooks_own_display_works_on_a_rank(book: Notebook) -> None:
    book.ok("from IPython.display import display, HTML")
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2
            display(HTML(f'<b>bold {rank}</b>'), 'and text')
            def show():
                display(HTML('<i>again</i>'))
            show()""")
    )
    assert [each["data"]["text/html"] for each in displays(book, 1)] == ["<b>bold 1</b>", "<i>again</i>"]
    assert "and text" in outcome.view


def test_updates_take_their_place_and_clearing_clears(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 1
            from IPython.display import clear_output, display, update_display, HTML
            display(HTML('gone'))
            clear_output()
            handle = display(HTML('a'), display_id=True)
            display(HTML('b'))
            handle.update(HTML('c'))
            update_display(HTML('d'), display_id=handle.display_id)""")
    )
    assert [each["data"]["text/html"] for each in displays(book)] == ["d", "b"]


def test_clearing_takes_what_was_printed_too(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2
            from IPython.display import clear_output, display, HTML
            import sys
            for step in range(50):
                print('step', step, rank)
                print('error', step, file=sys.stderr)
                clear_output(wait=True)
            print('end of', rank)""")
    )
    assert "end of 0" in outcome.view
    assert "end of 1" in outcome.view
    assert "step" not in outcome.view


def test_displays_inside_the_inline_pool_are_the_kernels_own(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 1 --pool inline
            from IPython.display import HTML
            display(HTML('<b>here</b>'))""")
    )
    assert "text/html" in outcome.kinds


def test_ranks_that_display_nothing_do_not_load_ipython(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 1 --fresh
            import sys
            display('text')
            'IPython' in sys.modules""")
    )
    assert "False" in outcome.result
