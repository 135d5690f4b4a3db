"""A Jupyter server of the test's own, and its pages in Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

import jupyter_distrib
from tests.processes import agents, wait_until, wait_until_gone

TOP = Path(__file__).parent.parent.parent
ARTIFACTS = TOP / "artifacts" / "browser"
PACKAGE = Path(jupyter_distrib.__file__).parent
TOKEN = "browser-tests"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000
"""Against hangs only."""
expect.set_options(timeout=PATIENCE_MS)
KNOWN_ERRORS = (
    "reading 'schema'",
    "filebrowser:open-path",
    "reading 'last_modified'",
    "Canceled future for kernel_info_request",
)
"""Of Notebook itself, with and without us: the first two of 7.6.5, the third of 7.2.3; and of JupyterLab, when a kernel
ends that was too busy to answer a page which has just been loaded."""

BAD = """</pre></div><script>window.pwned=1</script><img src=x onerror='window.pwned=1'><svg onload='window.pwned=1'></svg>"""
"""What would run if a page took it for anything but text."""


TRAINING = """%%distributed --ranks 4 --strategy ddp
import os, time
import torch, jupyter_distrib
import torch.distributed as dist
from torch import nn
torch.manual_seed(0)
model = jupyter_distrib.prepare(nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in jupyter_distrib.progress(range(100_000)):
    x = torch.randn(32, 20)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    jupyter_distrib.report(loss=loss.item())
    enough = torch.tensor(float(os.path.exists("ENOUGH")))
    dist.all_reduce(enough)  # so that all leave at the same step
    if enough:
        break
    time.sleep(0.05)
print('trained')
round(loss.item(), 3) < 1000"""


def chromium() -> str | None:
    """The system's browser; Playwright's own is never downloaded."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


class Server:
    """`jupyter lab`, which also serves Notebook 7; everything that it writes is below one folder."""

    def __init__(self, folder: Path, kernels: dict[str, Path | None]) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self._install(folder / "data", kernels)
        news = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        news.parent.mkdir(parents=True)
        news.write_text('{"fetchNews": "false"}')  # else a question covers a corner of the page
        for name in ("LabApp", "JupyterNotebookApp"):  # so that tests can run a command as menus do
            config = folder / "config" / f"jupyter_{'lab' if name == 'LabApp' else 'notebook'}_config.json"
            config.parent.mkdir(exist_ok=True)
            config.write_text(json.dumps({name: {"expose_app_in_browser": True}}))
        self.port = _free_port()
        env = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_PREFER_ENV_PATH": "0",  # else an older sidebar that is installed beside this one comes first
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
            "PYTHONPATH": str(PACKAGE.parent),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        python = os.environ.get(
            "JUPYTER_DISTRIB_LAB", sys.executable
        )  # of another environment, with another JupyterLab
        command = [
            *(python, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={self.port}"),
            *("--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.work}"),
            *("--allow-root", "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
        ]
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self._wait_until_up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _install(self, data: Path, kernels: dict[str, Path | None]) -> None:
        """Our front end as the wheel installs it, and a kernel of each ipykernel."""
        extensions = data / "labextensions"
        extensions.mkdir(parents=True)
        (extensions / "jupyter-distrib").symlink_to(PACKAGE / "labextension")
        for name, packages in kernels.items():
            path = os.pathsep.join(filter(None, (packages and str(packages), str(PACKAGE.parent))))
            spec = {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": name,
                "language": "python",
                "env": {"PYTHONPATH": path},
            }
            folder = data / "kernels" / name
            folder.mkdir(parents=True)
            (folder / "kernel.json").write_text(json.dumps(spec))

    def forget_theme(self) -> None:
        """Pages that are opened from here on are light, as JupyterLab is at first."""
        theme = self.folder / "settings" / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings"
        theme.unlink(missing_ok=True)

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server has ended:\n{self.log.read_text()}")
            try:
                self.get("/api")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)  # a server that starts tells nobody
            else:
                return
        raise AssertionError(f"the server does not answer:\n{self.log.read_text()}")

    def get(self, path: str) -> Any:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self.url + path, method=method, headers={"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def kernels(self) -> list[dict[str, Any]]:
        """All kernels; the server fails to list them (500) in the moment in which one starts, and is asked again."""
        deadline = time.monotonic() + 10
        while True:
            try:
                found: list[dict[str, Any]] = self.get("/api/kernels")
            except urllib.error.HTTPError as error:
                if error.code != 500 or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return found

    def end_kernels(self) -> None:
        for kernel in self.kernels():
            try:
                self._ask("DELETE", f"/api/kernels/{kernel['id']}")
            except urllib.error.HTTPError as error:
                if error.code != 404:  # it has ended meanwhile
                    raise

    def is_idle(self) -> bool:
        """Whether no kernel runs a cell."""
        return all(kernel["execution_state"] == "idle" for kernel in self.kernels())

    def wait_until_idle(self) -> None:
        """Until no kernel runs a cell: the server hears that also while no page is open."""
        assert wait_until(self.is_idle, PATIENCE_MS / 1000), "the kernels do not come to an end"

    def notebook(self, name: str, cells: list[str], kernel: str = "python3") -> Path:
        """A notebook file with these cells."""
        document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        document.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
        path = self.work / name
        nbformat.write(document, path)
        return path

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Lab:
    """One page with one notebook in it, and what a user does there."""

    def __init__(
        self,
        browser: Browser,
        server: Server,
        notebook: str,
        *,
        classic: bool = False,
        height: int = 860,
        scale: float = 1,
    ) -> None:
        self.server, self.name, self.classic = server, notebook, classic
        self.context = browser.new_context(viewport={"width": 1280, "height": height}, device_scale_factor=scale)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.errors: list[str] = []
        self.page.on("pageerror", self._failed)
        self.open()

    def _failed(self, error: Any) -> None:
        if not any(known in str(error) for known in KNOWN_ERRORS):
            self.errors.append(str(error))

    def open(self, *, reset: bool = True) -> None:
        way = f"/notebooks/{self.name}?" if self.classic else f"/lab/tree/{self.name}?{'reset&' if reset else ''}"
        self.page.goto(f"{self.server.url}{way}token={TOKEN}")
        self.wait_for_notebook()

    def wait_for_notebook(self) -> None:
        expect(self.page.locator(".jp-Notebook .jp-Cell").first).to_be_visible(timeout=PATIENCE_MS)
        self.page.wait_for_function("() => (window.jupyterapp ?? window.jupyterlab)?.commands", timeout=PATIENCE_MS)

    def reload(self) -> None:
        """As the user does it; without the question that a page with changes asks."""
        self.open(reset=False)

    def leave(self) -> None:
        """Close the page, as it is: nothing is saved."""
        self.page.goto("about:blank")

    def wait_until_restored(self, panel: str) -> None:
        """Until the server has been told that a page that is loaded is to have this panel open."""
        deadline, layout = time.monotonic() + PATIENCE_MS / 1000, {}
        while time.monotonic() < deadline:
            layout = self.server.get("/lab/api/workspaces/default")["data"].get("layout-restorer:data", {})
            if layout.get("left", {}).get("current") == panel:
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{panel} is not in the layout that is kept: {layout}")

    def do(self, command: str, **args: Any) -> None:
        """A command of the front end, as the palette and menus run it."""
        self.page.evaluate(
            "([id, args]) => { void (window.jupyterapp ?? window.jupyterlab).commands.execute(id, args); }",
            [command, args],
        )

    def select(self, index: int) -> Locator:
        cell = self.cell(index)
        cell.locator(".jp-InputArea-prompt, .jp-InputPrompt").first.click()
        return cell

    def run(self, index: int) -> None:
        """Run a cell once the kernel is idle: until then it would be dropped, and so it is behind a cell that fails.

        Does not wait for its end.
        """
        self.wait_for_kernel()
        self.select(index)
        self.do("notebook:run-cell")

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-Cell-outputArea")

    def ended(self, index: int) -> Locator:
        """The cell's output, once the cell has ended."""
        self.wait_idle(index)
        return self.output(index)

    def wait_idle(self, index: int) -> None:
        """Until the cell has its number, so until it has ended."""
        expect(self.cell(index).locator(".jp-InputPrompt").first).to_have_text(
            re.compile(r"\[\d+\]:"), timeout=PATIENCE_MS
        )

    def wait_for_kernel(self) -> None:
        """Until the notebook's kernel is there and says that it is idle, as it also does when it has answered the panel."""
        self.page.wait_for_function(
            """() => {
                const app = window.jupyterapp ?? window.jupyterlab;
                return app.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle';
            }""",
            timeout=PATIENCE_MS,
        )

    def load_extension(self, index: int = 0) -> None:
        """Run the cell that loads the extension."""
        self.run(index)
        self.wait_idle(index)

    def panel(self) -> Locator:
        """The sidebar, open."""
        panel = self.page.locator("#jupyter-distrib-panel")
        if not panel.is_visible():
            self.do("jupyter-distrib:open")
        expect(panel).to_be_visible()
        return panel

    def palette(self, text: str) -> None:
        """Choose an entry of the command palette as a user does, by the keyboard."""
        self.page.keyboard.press("Control+Shift+C")
        box = self.page.locator(".lm-CommandPalette-input")
        expect(box).to_be_visible()
        box.fill(text)
        expect(self.page.locator(".lm-CommandPalette-item.lm-mod-active")).to_contain_text(text)
        self.page.keyboard.press("Enter")

    @property
    def path(self) -> Path:
        return self.server.work / self.name

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook; returns what is in the file."""
        path = self.path
        before = path.stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while path.stat().st_mtime_ns == before or not _is_written(path):
            dialogs = self.page.locator(".jp-Dialog").all_inner_texts()
            assert time.monotonic() < deadline, f"{path} has not been saved {dialogs}"
            self.do("docmanager:save")  # JupyterLab drops it while an earlier save, such as its own, goes on
            self.page.wait_for_timeout(500)
        return nbformat.read(path, as_version=4)

    def dark(self) -> None:
        self._change_theme("JupyterLab Dark", light="false")

    def light(self) -> None:
        self._change_theme("JupyterLab Light", light="true")

    def _change_theme(self, name: str, *, light: str) -> None:
        self.do("apputils:change-theme", theme=name)
        expect(self.page.locator(f"body[data-jp-theme-light={light}]")).to_be_attached()
        expect(
            self.page.locator("#jupyterlab-splash")
        ).not_to_be_attached()  # it covers the page while styles are loaded

    def colour(self, target: Locator, of: str) -> list[int]:
        """Red, green and blue of a style."""
        found = target.evaluate("(node, of) => getComputedStyle(node)[of]", of)
        return [int(each) for each in re.findall(r"\d+", found)[:3]]

    def shoot(self, name: str, target: Locator | None = None) -> Path:
        """A picture for people to look at, in `artifacts/browser`, which git ignores."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        (target or self.page).screenshot(path=str(path))
        return path

    def close(self) -> None:
        self.context.close()


def until(cell: str, enough: Path) -> str:
    """The cell, which goes on until this file is there."""
    return cell.replace("ENOUGH", str(enough))


def press_copy(button: Locator) -> None:
    """Press a button that copies, and wait for what it says for a moment."""
    button.evaluate(
        """node => {
            window.said = [];
            new MutationObserver(() => window.said.push(node.textContent)).observe(node, { childList: true, characterData: true, subtree: true });
        }"""
    )
    button.click()
    button.page.wait_for_function("() => window.said.includes('Copied')", timeout=PATIENCE_MS)


def harmless(lab: Lab, where: str, *drawn: str) -> None:
    """What the ranks wrote is there as text: nothing in it has run, or could when it is clicked."""
    expect(lab.page.locator(where, has_text="window.pwned").first).to_be_visible()
    for kind in ("script", "[onerror]", "[onload]", "a", *drawn):
        expect(lab.page.locator(f"{where} {kind}")).to_have_count(0)
    assert lab.page.evaluate("window.pwned") is None


@contextmanager
def serving(kernels: dict[str, Path | None]) -> Iterator[tuple[Browser, Server]]:
    """A browser and a server outside of tests, and agents of their own, which end with them."""
    with tempfile.TemporaryDirectory(prefix="jd-") as folder, sync_playwright() as playwright:
        os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"] = f"{folder}/run"
        os.environ["JUPYTER_DISTRIB_LOG_DIR"] = f"{folder}/logs"
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_FLAGS)
        server = Server(Path(folder) / "jupyter", kernels)
        try:
            yield browser, server
        finally:
            server.end_kernels()
            server.close()
            browser.close()
            left = agents(Path(folder) / "run")
            for pid in left:
                os.kill(pid, signal.SIGTERM)
            wait_until_gone(left)


def _is_written(path: Path) -> bool:
    """Whether the whole notebook is there: the server empties the file before it writes it."""
    try:
        nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError:
        return False
    return True
