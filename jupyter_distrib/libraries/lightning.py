"""The facts about Lightning. It divides its data itself, and starts its own ranks unless TORCHELASTIC_RUN_ID is set. It
ignores SIGINT while it shuts down, and leaves it ignored; `process_reset.py` puts every handler back."""

from __future__ import annotations

from jupyter_distrib.libraries.library import Library

LIGHTNING = Library(
    modules=("lightning", "pytorch_lightning"),
    extra="lightning",
    instead_of_launching="with Lightning take strategy='ddp' instead of 'ddp_notebook' or 'ddp_spawn'",
    divides_data=True,
)
