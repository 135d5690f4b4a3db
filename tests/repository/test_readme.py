"""README and docs are true: the options are those that exist, the code runs, and what it prints is what they say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.settings import config_files
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.help import markdown_tables
from tests.notebook import ROOT, Notebook
from tests.repository.test_notebooks import site_module

README, DOCS = ROOT / "README.md", ROOT / "docs"
_BLOCK = re.compile(r"```python\n(?P<code>.*?)\n```(?:\n+<!-- output -->\n```text\n(?P<output>.*?)\n```)?", re.DOTALL)


@dataclass(frozen=True)
class Block:
    code: str
    output: str


def blocks() -> list[Block]:
    """The cells that a reader can run, in the order in which they would."""
    pages = (README, *(DOCS / f"{page}.md" for page in ("python-api", "queue", "teaching", "index", "first-training")))
    return [
        Block(found["code"], found["output"] or "")
        for page in pages
        for found in _BLOCK.finditer(page.read_text("utf-8"))
    ]


def comparable(output: str) -> list[str]:
    """Lines without times, in an order that does not hang on which rank was first."""
    return sorted(re.sub(r"\b\d+(\.\d)? s\b", "N s", line) for line in output.splitlines() if line)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel on a machine without GPUs, which the printed output is of."""
    with Notebook(tmp_path_factory.mktemp("readme"), {"CUDA_VISIBLE_DEVICES": ""}) as notebook:
        yield notebook


def test_the_readme_is_short() -> None:
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900


def test_the_tables_of_options_are_those_made_from_the_options() -> None:
    text = (DOCS / "options.md").read_text("utf-8")
    tables = text.partition("<!-- options -->\n")[2].partition("<!-- /options -->")[0]

    assert tables.strip() == markdown_tables(strategies=STRATEGIES, pools=POOLS), "run python -m tests.generated"


@pytest.mark.slow
def test_every_python_block_runs_one_after_another_and_prints_what_it_says(book: Notebook) -> None:
    found = blocks()
    assert len(found) >= 3
    for block in found:
        outcome = book.ok(block.code)
        if block.output:
            assert comparable(outcome.text) == comparable(block.output), outcome.text
    assert any(block.output for block in found)


def test_every_line_magic_and_error_that_the_docs_name_exists() -> None:
    from jupyter_distrib import errors
    from jupyter_distrib.kernel.notebook.line_magics import LineMagics
    from jupyter_distrib.kernel.notebook.magic import CellMagics

    text = "\n".join(page.read_text("utf-8") for page in (README, *DOCS.glob("*.md")))
    for magic in re.findall(r"`%(distributed_\w+)", text):
        assert magic in {*LineMagics.magics["line"], *CellMagics.magics["line"]}
    for name in re.findall(r"^## (\w+(?:Error|Lost|Timeout))$", text, re.MULTILINE):
        assert hasattr(errors, name), name


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_code_of_the_docs_is_python(page: Path) -> None:
    """Also what no test can run, since it needs a GPU or a cluster."""
    code = re.findall(r"^( *)```i?python\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for indent, block in code:
        cell = re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
        body = re.sub(r"\A(%%distrib\w*.*\n)+", "", cell)
        compile(TransformerManager().transform_cell(body), page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_code_below_the_magic_has_colours() -> None:
    module = site_module("cell_lexer")

    def kinds(code: str) -> dict[str, str]:
        return {word.strip(): str(kind) for kind, word in module.CellLexer().get_tokens(code)}

    for first in ("%%distributed --gpus 2", "%%distributed", "%%distrib", "%%distributed_setup metrics"):
        found = kinds(
            dedent(f"""\
                {first}
                for x in data:
                    pass
            """)
        )
        assert found[first] == "Token.Comment.Preproc"
        assert found["for"] == "Token.Keyword"
    assert kinds("for x in data: pass\n")["for"] == "Token.Keyword"
    assert "for" not in kinds("%%bash\nfor x in data\n"), "no Python"


def test_every_line_magic_has_its_row_in_the_docs() -> None:
    from jupyter_distrib.kernel.notebook.line_magics import LineMagics

    rows = (DOCS / "magics.md").read_text("utf-8")
    assert [name for name in LineMagics.magics["line"] if f"`%{name}" not in rows] == []


@pytest.mark.parametrize("page", [README, DOCS / "why.md"], ids=lambda page: page.name)
def test_figures_of_other_tools_are_those_of_a_run(page: Path) -> None:
    (run,) = (ROOT / "benchmarks/results").glob("*-peers.md")
    measured = run.read_text("utf-8")
    figures = re.search(r"^## Figures\n(.*?)^## ", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert figures is not None
    table = [row for row in figures[1].splitlines() if row.startswith("|")]
    times = re.findall(r"\b[\d.]+ m?s\b", "\n".join(table))
    assert len(times) > 20
    assert [time for time in times if time not in measured] == []


def test_pictures_are_small_and_there_in_both_themes() -> None:
    pictures = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    for name, size_bytes in pictures.items():
        assert size_bytes < (2_000_000 if name.endswith(".gif") else 300_000), name
        assert name.replace("-light.png", "-dark.png").replace("-dark.png", "-light.png") in pictures, name


def test_every_test_that_the_docs_name_exists() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for page in (ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        text = page.read_text("utf-8")
        paths, names = re.findall(r"`(tests/[\w/.]+)`", text), re.findall(r"`(test_\w+)\b", text)
        assert [path for path in paths if not (ROOT / path).exists()] == [], page
        assert [name for name in names if f"def {name}(" not in sources] == [], page


def test_every_address_that_the_product_names_is_a_heading_of_the_docs() -> None:
    from jupyter_distrib import errors
    from jupyter_distrib.kernel.notebook import doctor

    public = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, DistributedError)]
    assert {each.__name__: each("text")._render_traceback_()[-1] for each in public} == {
        each.__name__: f"More: {errors.page('errors', each.__name__.lower() if each is not DistributedError else '')}"
        for each in public
    }
    addresses = {each("text").page for each in public} | {errors.page(*each) for each in doctor.EXPLAINED.values()}
    for address in sorted(addresses):
        name, _, section = address.removeprefix(errors.SITE).partition(".html")
        text = (DOCS / f"{name}.md").read_text("utf-8")
        headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        assert section.removeprefix("#") in {"", *headings}, address


def test_everything_that_can_be_wrong_is_explained() -> None:
    from jupyter_distrib.kernel.notebook import doctor

    source = Path(doctor.__file__).read_text("utf-8")
    wrong = re.findall(r'topic="([\w ]+)"[^\n]*advice=', source)
    assert len(wrong) >= 8
    assert set(wrong) <= doctor.EXPLAINED.keys()


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT) for path in (README, *(ROOT / "docs").glob("*.md"))), ids=str
)
def test_every_link_leads_to_a_file_that_exists(page: Path) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_every_environment_variable_is_in_the_docs_and_the_other_way_round() -> None:
    sources = "\n".join(file.read_text("utf-8") for file in (ROOT / "jupyter_distrib").rglob("*.py"))
    variable = re.compile(r"\bJUPYTER_DISTRIB_[A-Z_]*[A-Z]\b")
    assert set(variable.findall((DOCS / "settings.md").read_text("utf-8"))) == set(variable.findall(sources))


def test_every_key_of_the_settings_files_is_in_the_docs() -> None:
    text = (DOCS / "settings.md").read_text("utf-8")
    top, _, pool = text.partition("## Keys of a pool")
    assert set(re.findall(r"^\| `(\w+)` \|", top, re.MULTILINE)) == set(config_files.KEYS)
    assert {*config_files.KEYS_OF_A_POOL} <= set(re.findall(r"`(\w+)`", pool))
