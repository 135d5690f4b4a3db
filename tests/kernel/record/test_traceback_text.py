"""Whose code a frame is."""

from __future__ import annotations

import json
import sysconfig

import pytest

from jupyter_distrib.kernel.analysis.traceback_text import headline, owner
from jupyter_distrib.kernel.session.runs import run
from jupyter_distrib.wire import messages as m

INSTALLED = f"{sysconfig.get_paths()['purelib']}/torch/nn/modules/linear.py"


@pytest.mark.parametrize(
    ("filename", "whose"),
    [
        ("Cell In[5]", "cell"),
        ("/home/ada/train.py", "user"),
        ("/home/ada/lib/python/train.py", "user"),
        ("<string>", "user"),
        pytest.param(INSTALLED, "library", id="installed"),
        pytest.param(json.__file__, "library", id="of Python"),
        ("/opt/other/lib/python3.12/json/decoder.py", "library"),
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", "library"),
        ("<frozen importlib._bootstrap>", "library"),
        pytest.param(run.__file__, "package", id="ours"),
        ("/on/a/node/lib/python3.11/site-packages/jupyter_distrib/worker/main.py", "package"),
    ],
)
def test_a_file_name_tells_whose_code_it_is(filename: str, whose: str) -> None:
    assert owner(filename) == whose


@pytest.mark.parametrize(
    ("last", "shown"),
    [
        ("\nLast error:\nsocketStartConnect: No route to host", " (socketStartConnect: No route to host)"),
        ("\nLast error:\n", ""),
        ("", ""),
    ],
)
def test_the_line_for_an_error_of_nccl_has_its_own_words(last: str, shown: str) -> None:
    message = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclSystemError: System call failed. "
    )
    failure = m.Failure(type_name="torch.distributed.DistBackendError", message=message + last)
    assert headline(failure) == f"DistBackendError: NCCL: unhandled system error{shown}"
    plain = m.Failure(type_name="ValueError", message="one\ntwo")
    assert headline(plain) == "ValueError: one"


def test_python_is_not_asked_for_its_folders_for_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("it takes 0.15 ms, and a thousand ranks have twenty frames each")

    monkeypatch.setattr(sysconfig, "get_paths", asked)
    assert owner("/home/me/utils.py") == "user"
    assert owner(json.__file__) == "library"
