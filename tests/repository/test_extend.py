"""`jupyter_distrib.extend` is all that other packages need: the examples of the docs import nothing else, and they run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib import extend
from tests.installed_package import bring
from tests.notebook import ROOT, Notebook
from tests.settings_files import write_trusted

PAGES = ("writing-a-pool.md", "writing-an-observer.md", "strategies.md")
FOR_AUTHORS = {"jupyter_distrib.extend", "jupyter_distrib.testing"}


def code_of(page: str) -> list[str]:
    """The Python of a page, without cells."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)
    return [code for code in found if not code.startswith("%")]


def test_all_of_it_is_named() -> None:
    found = {name for name, value in vars(extend).items() if not name.startswith("_") and name != "annotations"}
    assert found == set(extend.__all__)
    assert list(extend.__all__) == sorted(extend.__all__)


def test_it_loads_neither_torch_nor_ipython() -> None:
    code = "import sys, jupyter_distrib.extend; print(*({'torch', 'ray', 'IPython'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_import_nothing_else_of_this_package(page: str) -> None:
    imported = set()
    for code in code_of(page):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                names = (
                    [node.module]
                    if node.module != "jupyter_distrib"
                    else [f"{node.module}.{each.name}" for each in node.names]
                )
                imported |= {name for name in names if name and name.startswith("jupyter_distrib")}
            elif isinstance(node, ast.Import):
                imported |= {each.name for each in node.names if each.name.startswith("jupyter_distrib.")}
    assert "jupyter_distrib.extend" in imported
    assert imported <= FOR_AUTHORS


@pytest.mark.slow
def test_the_strategy_of_the_docs_trains_in_a_cell(tmp_path: Path) -> None:
    (code,) = (block for block in code_of("strategies.md") if "class Averaged" in block)
    env = bring(tmp_path, "[jupyter_distrib.strategies]\naveraged = theirs:Averaged\n", theirs=code)
    with Notebook(tmp_path, env=env) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import torch, jupyter_distrib
                model = torch.nn.Linear(1, 1, bias=False)""")
        )
        outcome = book.ok(
            dedent("""\
                %%distributed --ranks 2 --strategy averaged --buffers --keep model
                with torch.no_grad(): model.weight.fill_(1.0 + 2 * rank)
                jupyter_distrib.prepare(model);""")
        )
        assert "models are averaged at the end" in outcome.view
        assert book.ok("%%distributed --strategy averaged\nmodel.weight.item()").result == "ranks 0-1: 2.0"
        assert "--buffers" in book.ok("%%distributed?").page


@pytest.mark.slow
def test_a_pool_of_another_package_is_complete(tmp_path: Path) -> None:
    """Options, help, settings files, the status and the sidebar know it, though nothing here names it."""
    (code,) = (block for block in code_of("writing-a-pool.md") if "class WrappedPool" in block)
    write_trusted(tmp_path, 'pool = "gentle"\n[pools.gentle]\nkind = "wrapped"\nthrough = "nice -n 1"\n')
    env = bring(tmp_path, "[jupyter_distrib.pools]\nwrapped = theirs:WrappedPool\n", theirs=code)
    with Notebook(tmp_path, env=env) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import os
                own = os.nice(0)""")
        )
        assert book.ok("%%distributed --pool gentle --ranks 2\nos.nice(0) - own").result == "ranks 0-1: 1"
        assert (
            book.ok("%%distributed --ranks 2 --pool wrapped --through 'nice -n 2'\nos.nice(0) - own").result
            == "ranks 0-1: 2"
        )
        assert "--through COMMAND" in book.ok("%%distributed?").page
        assert "did you mean --through" in book.fails("%%distributed --pool wrapped --throgh x\n1").traceback
        row = next(line for line in book.ok("%distributed_pool").result.splitlines() if line.startswith("gentle"))
        assert "wrapped" in row
        overview = book.ok(
            "from jupyter_distrib.kernel.sidebar import bridge\n"
            "[(p['name'], p['kind']) for p in bridge.handle({'op': 'overview'})['overview']['pools']]"
        ).result
        assert "('gentle', 'wrapped')" in overview


DOCKER = """#!/bin/sh
# exec -i HOST WORD...: the container is this machine
echo "$@" >> "$0.calls"
case "$3" in gone) echo "No such container: gone" >&2; exit 1;; esac
shift 3
exec "$@"
"""


@pytest.mark.slow
def test_a_pool_of_hosts_of_another_package_needs_its_command_only(tmp_path: Path) -> None:
    (code,) = (block for block in code_of("writing-a-pool.md") if "class DockerPool" in block)
    assert len(code.splitlines()) <= 25
    program = tmp_path / "bin" / "moby"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    bring(program.parent, "[jupyter_distrib.pools]\ndocker = theirs:DockerPool\n", theirs=code)
    with Notebook(tmp_path) as book:
        book.ok(
            dedent(f"""\
                import sys
                sys.path.append({str(program.parent)!r})
                %load_ext jupyter_distrib
                x = 20""")
        )
        line = f"%%distributed --pool docker --docker {program} --python {sys.executable} --interface lo"
        two = f"{line} --hosts one,two --nodes 2 --ranks 2"
        assert book.ok(f"{two}\nx + rank").result == "rank 0: 20\nrank 1: 21"
        called = [each.split() for each in Path(f"{program}.calls").read_text().splitlines()]
        assert sorted(call[:4] for call in called) == [["exec", "-i", host, sys.executable] for host in ("one", "two")]
        assert "docker to one, two" in book.ok("%distributed_status").text
        refused = book.fails(f"{line} --hosts gone --ranks 1\n1").text
        assert "No such container: gone" in refused
        assert f"try `{program} exec -i gone {sys.executable} --version`" in refused
        assert "needs hosts" in book.fails(f"{line} --ranks 1\n1").text
        nowhere = line.replace(str(program), "nowhere")
        assert "the docker pool needs nowhere" in book.fails(f"{nowhere} --hosts one --ranks 1\n1").text


@pytest.mark.slow
def test_the_observer_of_the_docs_writes_the_numbers_of_a_run(tmp_path: Path) -> None:
    (code,) = (block for block in code_of("writing-an-observer.md") if "class MetricsFile" in block)
    env = bring(tmp_path, "[jupyter_distrib.observers]\nmetrics_file = theirs:follow\n", theirs=code)
    with Notebook(tmp_path, env=env) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import os, jupyter_distrib
                os.environ['METRICS_FOLDER'] = 'numbers'""")
        )
        outcome = book.ok(
            dedent("""\
                %%distributed --ranks 2
                jupyter_distrib.report(loss=0.5 * rank)
                os.path.basename(os.environ['METRICS_FILE'])""")
        )
        name = outcome.result.removeprefix("ranks 0-1: ").strip("'")
        rows = (tmp_path / "numbers" / name).read_text().splitlines()
        assert rows[0] == "rank,step,name,value"
        assert sorted(rows[1:-1]) == ["0,0,loss,0.0", "1,0,loss,0.5"]
        assert rows[-1] == "# done"
        assert f"reported numbers: numbers/{name}" in outcome.view
        book.ok("del os.environ['METRICS_FOLDER']")
        book.ok("%%distributed --ranks 2\njupyter_distrib.report(loss=1.0)")
        assert len(list((tmp_path / "numbers").iterdir())) == 1
