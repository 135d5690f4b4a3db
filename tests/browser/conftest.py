"""One server and one browser for the tests of a module; a fresh page for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import lab


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = lab.chromium()
    if path is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def server(folder: Path, browser: Any) -> Iterator[str]:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    with lab.serving(folder) as url:
        yield url


@pytest.fixture
def page(browser: Any, server: str, folder: Path) -> Iterator[lab.Page]:
    """A page; no script on it may have failed at the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 960})
    page = lab.Page(context.new_page(), server, folder)
    yield page
    context.close()
    assert page.errors == []


@pytest.fixture
def blank(browser: Any) -> Iterator[Any]:
    """A page without JupyterLab."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    yield context.new_page()
    context.close()
