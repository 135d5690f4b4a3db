"""One server and one browser for all browser tests; a page of its own for each test."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.browser.lab import Lab, Server

HERE = Path(__file__).parent
# They have an environment and a job of their own: `sh .ci/browser`.
collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]
Open = Callable[..., Any]
DEAF = ("ipykernel-7.2.0",)
"""Kernels that may never read a cell which is run while they answer another request, as pages make them when they are
loaded, with and without us (ipykernel#1554, mended in 7.4.0). Another one is taken if that was the first cell."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    from tests.browser.lab import CHROMIUM_FLAGS, PACKAGE, chromium

    program = chromium()
    if program is None:
        pytest.skip("no Chromium on this machine: install Debian's package chromium")
    if not (PACKAGE / "labextension" / "package.json").exists():
        pytest.skip("the sidebar is not built: sh .ci/sidebar")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def kernels() -> dict[str, Path | None]:
    """The kernels that notebooks can name: this environment's ipykernel, and those of the folders in
    JUPYTER_DISTRIB_IPYKERNELS (`6.31=/folder:7.2=/folder`), made by `pip install --target`."""
    others = os.environ.get("JUPYTER_DISTRIB_IPYKERNELS", "")
    pairs = (each.partition("=") for each in filter(None, others.split(os.pathsep)))
    return {"python3": None, **{f"ipykernel-{name}": Path(folder) for name, _, folder in pairs}}


@pytest.fixture(scope="session")
def server(
    browser: Browser, runtime: Path, kernels: dict[str, Path | None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from tests.browser.lab import Server

    server = Server(tmp_path_factory.mktemp("jupyter"), kernels)
    yield server
    server.end_kernels()
    server.close()


@pytest.fixture
def open_notebook(browser: Browser, server: Server) -> Iterator[Open]:
    """Call it with cells: a page that shows a notebook of them. The first cell loads the extension.

    No script on a page may have failed at the end.
    """
    from tests.browser.lab import Lab

    opened: list[Lab] = []

    def make(*cells: str, kernel: str = "python3", classic: bool = False, load: bool = True) -> Lab:
        while True:
            name = f"test{len(list(server.work.iterdir()))}.ipynb"
            server.notebook(name, ["%load_ext jupyter_distrib", *cells], kernel)
            lab = Lab(browser, server, name, classic=classic)
            opened.append(lab)
            try:
                if load:
                    lab.load_extension()
                return lab
            except AssertionError:
                if kernel not in DEAF or not server.is_idle():
                    raise
            lab.close()
            server.end_kernels()

    yield make
    for lab in opened:
        lab.close()
    server.forget_theme()
    server.end_kernels()
    assert [error for lab in opened for error in lab.errors] == []


@pytest.fixture
def enough(tmp_path: Path) -> Path:
    """Cells made by `until` go on until this file is there."""
    return tmp_path / "enough"


@pytest.fixture
def blank(browser: Browser) -> Iterator[Page]:
    """A page without JupyterLab."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    yield context.new_page()
    context.close()
