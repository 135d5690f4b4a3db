"""A real JupyterLab in a real browser: a server with folders of its own, and notebooks that are run by pressing keys."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "artifacts" / "browser"
"""Where screenshots go; ignored by git."""
TOKEN = "test"
READY_S = 60
IDLE = "() => document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'"


def chromium() -> str | None:
    """The system's browser; None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A JupyterLab server of this environment over a folder; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {name: str(folder / ".jupyter" / name) for name in ("config", "data", "settings", "workspaces")}
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "JUPYTER_CONFIG_DIR": own["config"],
        "JUPYTER_DATA_DIR": own["data"],
        "JUPYTERLAB_SETTINGS_DIR": own["settings"],
        "JUPYTERLAB_WORKSPACES_DIR": own["workspaces"],
    }
    arguments = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--allow-root"]
    arguments += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}", "--LabApp.news_url="]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments], env=env, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/api", folder / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def wait_until_up(address: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)  # nothing tells from outside when it listens
    raise AssertionError(f"no server: {log.read_text('utf-8', 'replace')[-2000:]}")


class Page:
    """One notebook in the browser."""

    def __init__(self, page: Any, url: str, folder: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self._url, self._folder = url, folder
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def write(self, name: str, cells: Sequence[str]) -> None:
        """Put a notebook into the folder."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])  # type: ignore[no-untyped-call]
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self._folder / f"{name}.ipynb")  # type: ignore[no-untyped-call]

    def open(self, name: str, *, app: str = "lab/tree", kernel: bool = True) -> None:
        self.page.goto(f"{self._url}/{app}/{name}.ipynb?token={TOKEN}&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=READY_S * 1000)
        if kernel:
            self.page.locator(".jp-Toolbar-kernelName", has_text="ipykernel").wait_for(timeout=READY_S * 1000)
            self.page.wait_for_function(IDLE, timeout=READY_S * 1000)

    def begin(self, index: int) -> None:
        """Run a cell, without waiting for it."""
        self.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def ended(self, index: int) -> Any:
        """Wait until the cell has its number; gives its output."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").nth(index)
        cell.locator(".jp-InputPrompt", has_text=f"[{index + 1}]:").wait_for(timeout=READY_S * 1000)
        return cell.locator(".jp-OutputArea").first

    def run(self, index: int) -> Any:
        self.begin(index)
        return self.ended(index)

    def save(self) -> None:
        self.page.keyboard.press("Control+s")
        self.page.wait_for_selector(".jp-mod-current:not(.jp-mod-dirty)", timeout=READY_S * 1000)

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(PICTURES / f"{name}.png"))
