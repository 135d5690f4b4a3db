"""The settings of Sphinx, which makes a site of this folder: `sh .ci/docs`."""

from __future__ import annotations

import html
import importlib.metadata
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

TOP = Path(__file__).parent.parent
sys.path.insert(0, str(TOP / "docs"))
import executed  # noqa: E402
from cell_lexer import CellLexer  # noqa: E402

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "reporting.md",
    "benchmarks/README.md": "measuring.md",
    **{f"example_notebooks/{each.name}": f"notebooks/{each.name}" for each in TOP.glob("example_notebooks/*.ipynb")},
}
"""The files of other folders that are pages of the site, by their paths; they are copied here for the build."""

METADATA = importlib.metadata.metadata("jupyter_distrib")
SOURCE = dict(each.split(", ") for each in METADATA.get_all("Project-URL", []))["Source"]

project = "jupyter_distrib"
copyright = "jupyter_distrib contributors"  # noqa: A001 - Sphinx reads this name
release = version = METADATA["Version"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence"]
nb_execution_mode = "off"  # they are run before: executed.py
myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "pydata_sphinx_theme"
html_title = "jupyter_distrib"
html_show_sourcelink = False
html_logo = html_favicon = "images/logo.svg"
html_sidebars = {"benchmarks": []}  # a page without others beside it
html_static_path = ["site"]
html_css_files = ["site.css"]
html_search_scorer = str(TOP / "docs" / "searching.js")
html_context = {
    "github_user": SOURCE.split("/")[-2],
    "github_repo": SOURCE.split("/")[-1],
    "github_version": "main",
    "doc_path": "docs",
}
html_theme_options = {
    "github_url": SOURCE,
    "logo": {"text": "jupyter_distrib"},
    "navigation_with_keys": True,
    "show_toc_level": 2,
    "use_edit_page_button": True,
}


def with_links_to_pages(text: str, file: str) -> str:
    """Return Markdown in which links to files that are pages lead to the pages.

    Args:
        text: The Markdown, or the notebook as JSON.
        file: The path of its file from the top folder, to which links are relative.
    """
    page = PAGES.get(file, os.path.relpath(file, "docs"))

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(file), match["path"]))
        target = PAGES.get(path, os.path.relpath(path, "docs"))
        return f"]({os.path.relpath(target, os.path.dirname(page))}{match['anchor'] or ''})"

    return re.sub(r"\]\((?P<path>[\w./-]+)(?P<anchor>#[^)\s]*)?\)", link, text)


def in_both_themes(text: str) -> str:
    """Return Markdown in which a picture of the light theme has that of the dark one beside it; one is shown."""

    def both(match: re.Match[str]) -> str:
        return "\n\n".join(
            f"```{{image}} {match['path']}-{theme}.png\n:alt: {match['alt']}\n:class: only-{theme}\n```"
            for theme in ("light", "dark")
        )

    return re.sub(r"^!\[(?P<alt>[^]]*)\]\((?P<path>\S+)-light\.png\)$", both, text, flags=re.MULTILINE)


def lead_to_pages(app: Sphinx, name: str, source: list[str]) -> None:
    page = str(app.env.doc2path(name, base=False))
    file = next((file for file, copied in PAGES.items() if copied == page), f"docs/{page}")
    source[0] = in_both_themes(with_links_to_pages(source[0], file))


def no_edit_link(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Leave out the link of a page whose file is in another folder than the theme thinks."""
    if f"{page}.md" in PAGES.values() or f"{page}.ipynb" in PAGES.values() or tree is None:
        context["theme_use_edit_page_button"] = False


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Give search engines the first paragraph of a page, unless the page describes itself."""
    if tree is None or 'name="description"' in context.get("metatags", ""):
        return
    first = next(tree.findall(nodes.paragraph), None)
    if first is not None:
        text = html.escape(" ".join(first.astext().split())[:300])
        context["metatags"] = f'{context.get("metatags", "")}<meta name="description" content="{text}">'


def remove_copies(app: Sphinx, error: Exception | None) -> None:
    for page in PAGES.values():
        (TOP / "docs" / page).unlink(missing_ok=True)
    with suppress(OSError):
        (TOP / "docs" / "notebooks").rmdir()


def setup(app: Sphinx) -> None:
    for file, page in PAGES.items():
        if not file.endswith(".ipynb"):
            shutil.copyfile(TOP / file, TOP / "docs" / page)
    executed.write_copies(sorted(TOP.glob("example_notebooks/*.ipynb")), TOP / "docs" / "notebooks")
    app.add_lexer("python", CellLexer)
    app.add_lexer("ipython", CellLexer)
    app.add_lexer("ipython3", CellLexer)
    app.connect("source-read", lead_to_pages)
    app.connect("html-page-context", no_edit_link)
    app.connect("html-page-context", describe)
    app.connect("build-finished", remove_copies)
