"""Editors, help and completion know the options of `@distributed` and `run_script`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import jupyter_distrib
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.cell_options import OF_CELLS, OPTIONS
from jupyter_distrib.kernel.settings.keywords import in_call
from tests import generated
from tests.notebook import Notebook


def test_the_types_are_those_of_the_options() -> None:
    assert generated.KEYWORDS.read_text("utf-8") == generated.keywords_source(), "run python -m tests.generated"


@pytest.mark.parametrize("function", [jupyter_distrib.distributed, jupyter_distrib.run_script])
def test_the_signature_has_every_option(function: object) -> None:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    everywhere = {option.name for option in OPTIONS} - {*OF_CELLS}
    own = {option.name for declared in (STRATEGIES, POOLS) for name in declared for option in declared[name]}
    assert everywhere | own <= parameters.keys()
    assert not {*OF_CELLS} & parameters.keys()
    assert parameters["max_restarts"].annotation == "int | None"
    assert parameters["gpus"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.slow
def test_a_kernel_completes_them(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("from jupyter_distrib import distributed")
        reply = book.client.complete("distributed(max_re", 18, reply=True, timeout=30)
        assert "max_restarts=" in reply["content"]["matches"]


@pytest.mark.parametrize(
    ("told", "in_python"),
    [
        ("give it by --env KMP_BLOCKTIME=0", "give it by env={'KMP_BLOCKTIME': '0'}"),
        ("give it by --env OMP_PLACES='{0}, {1}'", "give it by env={'OMP_PLACES': '{0}, {1}'}"),
        (
            "--env NCCL_SOCKET_IFNAME=NAME names another, --env NCCL_DEBUG=INFO tells more.",
            "env={'NCCL_SOCKET_IFNAME': 'NAME'} names another, env={'NCCL_DEBUG': 'INFO'} tells more.",
        ),
        (
            "name the interface with --env NCCL_SOCKET_IFNAME=NAME and GLOO_SOCKET_IFNAME=NAME.",
            "name the interface with env={'NCCL_SOCKET_IFNAME': 'NAME', 'GLOO_SOCKET_IFNAME': 'NAME'}.",
        ),
        ("with --env NCCL_SHM_DISABLE=1, which is slower", "with env={'NCCL_SHM_DISABLE': '1'}, which is slower"),
        ("the value of --env is read once", "the value of env is read once"),
    ],
)
def test_advice_on_a_variable_is_a_mapping_in_a_call(told: str, in_python: str) -> None:
    assert in_call(told, {}) == in_python
