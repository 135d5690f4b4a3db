"""Functions and models of pydantic that a notebook defines are used on the ranks."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

pytest.importorskip("pydantic")


@pytest.mark.slow
def test_a_checked_function_of_the_notebook_is_called_on_the_ranks(notebook: Notebook) -> None:
    notebook.ok("""
from pydantic import BaseModel, PrivateAttr, validate_call
class Settings(BaseModel):
    rate: float = 0.5
    _seen: dict = PrivateAttr(default_factory=dict)
@validate_call
def scaled(settings: Settings, factor: int) -> float:
    return settings.rate * factor
settings = Settings(rate="0.25")
settings._seen["k"] = 1
""")
    cell = """
try: refused = scaled(settings, "many")
except ValueError as error: refused = type(error).__name__
scaled(settings, "4"), settings._seen, refused
"""
    assert notebook.ok("%%distributed --ranks 2" + cell).result == "ranks 0-1: (1.0, {'k': 1}, 'ValidationError')"
