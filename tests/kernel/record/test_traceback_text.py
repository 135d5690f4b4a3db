"""Whose code a frame is."""

from __future__ import annotations

import json
import sysconfig

import pytest

from jupyter_distrib.kernel.analysis.traceback_text import owner
from jupyter_distrib.kernel.session.runs import run

INSTALLED = f"{sysconfig.get_paths()['purelib']}/torch/nn/modules/linear.py"


@pytest.mark.parametrize(
    ("filename", "whose"),
    [
        ("Cell In[5]", "cell"),
        ("/home/ada/train.py", "user"),
        ("/home/ada/lib/python/train.py", "user"),
        ("<string>", "user"),
        (INSTALLED, "library"),
        (json.__file__, "library"),
        ("/opt/other/lib/python3.12/json/decoder.py", "library"),
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", "library"),
        ("<frozen importlib._bootstrap>", "library"),
        (run.__file__, "package"),
        ("/on/a/node/lib/python3.11/site-packages/jupyter_distrib/worker/main.py", "package"),
    ],
)
def test_a_file_name_tells_whose_code_it_is(filename: str, whose: str) -> None:
    assert owner(filename) == whose
