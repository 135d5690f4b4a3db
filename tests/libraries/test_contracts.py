"""What training frameworks that cannot be installed here look for in a rank: stubs of their own checks. Real ranks."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

DEVICE_MAP = """%%distributed --ranks 2
import os, sys
early = [name for name in ("transformers", "trl", "peft", "unsloth", "accelerate") if name in sys.modules]
several = int(os.environ.get("WORLD_SIZE", "1")) > 1
{"": f"cuda:{os.environ['LOCAL_RANK']}"} if several else "sequential", early
"""
COMMAND_LINE = """%%distributed --ranks 2
import argparse, os, sys, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("config", nargs="?", default="config.yml")
known, rest = parser.parse_known_args()
launched = {name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"))}
known.config, rest, dist.is_initialized(), launched, os.environ["WORLD_SIZE"]
"""
INITIALIZE = """
import os, torch.distributed as dist

def initialize_dist(backend):
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}
    missing = {name for name in names if name not in os.environ}
    if missing and missing != names:
        raise RuntimeError(f"only some are set: {missing}")
    if dist.is_initialized():
        if dist.get_backend() != backend:
            raise RuntimeError(f"a foreign group of {dist.get_backend()}")
    else:
        assert not missing and os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
        dist.init_process_group(backend)
    if dist.get_rank() != int(os.environ["RANK"]) or dist.get_world_size() != int(os.environ["WORLD_SIZE"]):
        raise RuntimeError("the group and the environment differ")
    return dist.get_rank()
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    return shared_notebook


def test_unsloth_finds_its_device_map_and_no_library_that_came_before_it(book: Notebook) -> None:
    assert book.ok(DEVICE_MAP).result == "rank 0: ({'': 'cuda:0'}, [])\nrank 1: ({'': 'cuda:1'}, [])"


def test_axolotl_finds_a_clean_command_line_and_no_group(book: Notebook) -> None:
    assert book.ok(COMMAND_LINE).result == "ranks 0-1: ('config.yml', [], False, set(), '2')"


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_composer_makes_its_group_or_finds_one_of_its_backend(book: Notebook, strategy: str) -> None:
    book.ok(INITIALIZE)

    done = book.ok(f"%%distributed --ranks 2 --strategy {strategy}\ninitialize_dist('gloo')")

    assert done.result == "rank 0: 0\nrank 1: 1"


UNSLOTH = """
import sys
early = [name for name in ("transformers", "trl", "peft") if name in sys.modules]
patched = not early
"""


@pytest.mark.slow
def test_a_function_that_imports_unsloth_gets_ranks_that_have_imported_nothing(tmp_path: Path) -> None:
    (tmp_path / "unsloth.py").write_text(UNSLOTH)
    (tmp_path / "trl.py").write_text("")
    told = "on new ranks, since unsloth has to be imported before transformers, trl and peft"
    with Notebook(tmp_path) as own:
        own.ok("%load_ext jupyter_distrib")
        own.ok(
            dedent("""\
                %%distributed --ranks 2 --keep kept
                import trl
                kept = rank""")
        )
        cell = own.ok(
            dedent("""\
                %%distributed --ranks 2
                from unsloth import patched
                patched""")
        )
        assert (cell.result, told in cell.view) == ("ranks 0-1: True", True)
        own.ok("%%distributed --ranks 2\nimport trl")
        own.ok(
            dedent("""\
                import jupyter_distrib
                @jupyter_distrib.distributed(ranks=2)
                def train():
                    import unsloth
                    return unsloth.patched""")
        )
        function = own.ok("train.distributed()")
        assert (function.result, told in function.view) == ("ranks 0-1: True", True)
        assert own.ok("%%distributed --ranks 2\nkept").result == "rank 0: 0\nrank 1: 1"
        source = dedent("""\
            %%distributed --ranks 2
            'import unsloth'
            'unsloth'""")
        assert "new ranks" not in own.ok(source).view
