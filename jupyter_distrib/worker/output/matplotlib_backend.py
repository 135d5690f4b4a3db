"""Matplotlib's backend in ranks: figures are drawn in memory, and `plt.show()` displays them in the notebook.

Loaded by matplotlib itself, by the name in `displaying.BACKEND`. Figures that are still open when the cell ends are
shown then.
"""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas  # noqa: F401 - matplotlib looks for it

from jupyter_distrib.worker.output import displaying


def show(*_: object, **__: object) -> None:
    """Show all figures; `plt.show()` calls this."""
    displaying.show_figures()
