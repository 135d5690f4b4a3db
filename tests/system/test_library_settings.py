"""What is set in libraries, read and set again in another process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from jupyter_distrib.libraries import settings
from tests.notebook import ROOT, Notebook


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Put torch, numpy, logging and warnings back."""
    printing, handlers, level = np.get_printoptions(), logging.root.handlers[:], logging.root.level
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_printoptions(profile="default")
    np.set_printoptions(**printing)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.slow
def test_a_fresh_program_has_nothing_to_tell() -> None:
    program = (
        "import numpy, torch, logging\nfrom jupyter_distrib.libraries import settings as library_settings\n"
        "print(library_settings.read(), [*library_settings.that_stay()])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "{} []\n"


def test_settings_are_the_same_after_a_way_through_json() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_printoptions(precision=2, sci_mode=False)
    np.set_printoptions(precision=3, suppress=True)
    warnings.filterwarnings("ignore", "no thanks", UserWarning)
    warnings.simplefilter("error", RuntimeWarning)
    logging.root.handlers[:] = []
    logging.basicConfig(level=logging.INFO, format="mine %(message)s")
    told = json.loads(json.dumps(settings.read()))

    applied = settings.Applied()
    applied.apply(told)
    applied.apply({})  # as if the notebook had gone back to the defaults
    assert torch.get_default_dtype() == torch.float32
    assert np.get_printoptions()["precision"] == 8
    warnings.resetwarnings()
    applied.apply(told)

    assert settings.read() == told
    assert torch.get_default_dtype() == torch.float64
    assert str(torch.tensor([1 / 3])) == "tensor([0.33])"
    assert warnings.filters[0][:3] == ("error", None, RuntimeWarning)


def test_what_nobody_has_set_elsewhere_stays() -> None:
    torch.set_default_dtype(torch.float64)

    settings.Applied().apply({})

    assert torch.get_default_dtype() == torch.float64


@pytest.mark.slow
def test_ranks_have_what_the_notebook_has_set(notebook: Notebook) -> None:
    own = "__import__('jupyter_distrib.libraries.settings', fromlist=['']).read()"
    assert notebook.ok(own).result == "{}"  # what a kernel's own libraries set costs each new rank a millisecond
    notebook.ok(
        "import os, logging, torch, numpy\ntorch.set_default_dtype(torch.float64)\n"
        "numpy.set_printoptions(precision=2)\nlogging.basicConfig(level=logging.INFO, format='mine %(message)s')\n"
        "os.environ['TZ'] = 'Asia/Tokyo'"
    )

    there = notebook.ok(
        "%%distributed --ranks 2\nimport logging, time, numpy, torch\nlogging.info('heard')\n"
        "str(torch.ones(1).dtype), str(numpy.array([1 / 3])), time.tzname[0]"
    )
    assert there.result == "ranks 0-1: ('torch.float64', '[0.33]', 'JST')"
    assert "mine heard" in there.view

    notebook.ok("torch.set_default_dtype(torch.float32); del os.environ['TZ']")
    back = notebook.ok("%%distributed --ranks 2\nimport time, torch\nstr(torch.ones(1).dtype), time.tzname[0] == 'JST'")
    assert back.result == "ranks 0-1: ('torch.float32', False)"


@pytest.mark.slow
def test_a_default_device_is_said_not_to_be_set(notebook: Notebook) -> None:
    notebook.ok("import torch; torch.set_default_device('meta')")

    view = notebook.ok("%%distributed --ranks 1\nimport torch\ntorch.ones(1).device.type").view

    assert "torch's default device of the notebook, meta, is not set on the ranks: use `device`" in view


def test_levels_of_loggers_travel_and_are_taken_back() -> None:
    mine, other = logging.getLogger("my.training"), logging.getLogger("their.library")
    mine.setLevel(logging.DEBUG)
    told = json.loads(json.dumps(settings.read()))
    mine.setLevel(logging.NOTSET)
    assert told["levels of loggers"]["my.training"] == logging.DEBUG
    assert "their.library" not in told["levels of loggers"]

    other.setLevel(logging.ERROR)
    applied = settings.Applied()
    applied.apply(told)
    assert mine.level == logging.DEBUG
    applied.apply({})
    assert (mine.level, other.level) == (logging.NOTSET, logging.ERROR)
    other.setLevel(logging.NOTSET)
