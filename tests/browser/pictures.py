"""Takes the pictures of README and docs, of real runs in JupyterLab: `.venv-browser/bin/python -m tests.browser.pictures`.

Each is taken in the light and in the dark theme; `running.gif` is an animation. A picture carries what the page showed when
it was taken: the code, the words of buttons and headings, and the parts of our views. With `--check` nothing is taken: the
runs are made again, and pictures that a page has outgrown are named with what differs, the animation too. `test_pictures.py` does the same.
Names of scenes (`first_training`) take only their pictures.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, PngImagePlugin
from playwright.sync_api import Browser, Locator, expect

from tests.browser.lab import TOP, Lab, Server, serving

IMAGES = TOP / "docs" / "images"
THEMES = ("light", "dark")
SLOWEST_MS = 600
"""The longest that a frame of the animation lasts, however slow the machine was."""
KEY = "Shows"
"""The name of the text in a PNG that says what it shows."""
LOAD = "%load_ext jupyter_distrib"
DATA = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(24_000, 64)
y = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))(x).argmax(1)
data = TensorDataset(x, y)"""
TRAIN = """%%distributed --ranks 4 --strategy ddp
import jupyter_distrib

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(data, batch_size=64, shuffle=True)
for epoch in jupyter_distrib.progress(range(200), label="epoch"):
    for x, y in jupyter_distrib.progress(loader, label="step"):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        jupyter_distrib.report(loss=loss.item(), accuracy=(out.argmax(1) == y).float().mean().item())
    print(f"epoch {epoch}: loss {loss.item():.2f}")"""
STALL = """%%distributed --ranks 4 --strategy ddp
import time
import torch.distributed as dist

def load_batch(step):
    if rank == 2 and step == 40:
        time.sleep(3600)  # the network drive is gone
    return torch.ones(8)

for step in jupyter_distrib.progress(range(200), label="step"):
    dist.all_reduce(load_batch(step))
    time.sleep(0.05)"""
SHORT = """%%distributed --ranks 4 --strategy ddp
model = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in jupyter_distrib.progress(DataLoader(data, batch_size=2), label="step"):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    jupyter_distrib.report(loss=loss.item())"""
NEXT = """%%distributed --ranks 4
rank, str(device)"""
BY_CHANCE = re.compile(r"jd-(aloud|course.*|none|notes?|rate|timeline|told.*)")
"""Parts that come and go with the speed of the machine: sentences on slow ranks, steps that ranks fell behind."""
READ_PAGE = """root => {
    const parts = new Set(), words = new Set();
    for (const node of root.querySelectorAll('*')) {
        if (!node.checkVisibility()) continue;
        for (const name of node.classList) if (/^(jd-|jp-Distributed-)/.test(name)) parts.add(name);
        if (!node.matches('button, summary, label, h3, [placeholder]') || node.closest('.jp-Cell-inputWrapper')) continue;
        const own = [...node.childNodes].filter(each => each.nodeType === Node.TEXT_NODE).map(each => each.data).join('');
        words.add((node.getAttribute('placeholder') ?? own).trim().replace(/\\d+/g, '#'));
    }
    words.delete('');
    return {parts: [...parts].sort(), words: [...words].sort()};
}"""


@dataclass(frozen=True)
class Shown:
    """What a picture shows, or a page."""

    code: list[str]
    """The lines of the cells."""
    words: list[str]
    """Of buttons, fields and headings, with # for each number."""
    parts: list[str]
    """The classes of our views' elements that can be seen."""


@dataclass(frozen=True)
class View:
    """What can be taken: a part of a page that shows what the picture of that name is of."""

    name: str
    lab: Lab
    target: Locator
    code: str

    def shown(self) -> Shown:
        return Shown(self.code.splitlines(), **self.target.evaluate(READ_PAGE))


Scene = Callable[[Browser, Server], Iterator[View]]


def main(arguments: list[str]) -> int:
    os.environ["PYTHONWARNINGS"] = "ignore"  # torch without numpy
    found: list[str] = []
    with serving({"python3": None}) as (browser, server):
        if arguments == ["--check"]:
            found = [each for scene in SCENES for view in scene(browser, server) for each in outdated(view)]
        else:
            for scene in SCENES:
                if arguments and scene.__name__ not in arguments:
                    continue
                if scene is animated:
                    for _ in animated(browser, server, filmed=True):
                        pass
                    continue
                for view in scene(browser, server):
                    take(view)
                server.forget_theme()
    print(*found or ["The pictures show what the pages show."], sep="\n")
    return int(bool(found))


def take(view: View) -> None:
    for theme in THEMES:
        if theme == "dark":
            view.lab.dark()
        shown = PngImagePlugin.PngInfo()
        shown.add_itxt(KEY, json.dumps(asdict(view.shown())), zip=True)
        image = (
            Image.open(io.BytesIO(view.target.screenshot()))
            .convert("RGB")
            .quantize(256, kmeans=2, dither=Image.Dither.NONE)
        )
        image.save(IMAGES / f"{view.name}-{theme}.png", optimize=True, pnginfo=shown)
    view.lab.light()


def outdated(view: View) -> list[str]:
    """Return a sentence for each picture of the view that shows something else than the page."""
    found = []
    paths = sorted(IMAGES.glob(f"{view.name}*"))
    assert paths, view.name
    for path in paths:
        found += [f"{path.name}: {each}" for each in differences(told(path), view.shown())]
    return found


def told(path: Path) -> Shown:
    """Return what the picture or the animation says that it shows."""
    with Image.open(path) as image:
        image.load()
        return Shown(**json.loads(image.info["comment"] if path.suffix == ".gif" else image.text[KEY]))


def differences(picture: Shown, page: Shown) -> list[str]:
    """Return a sentence for each kind of thing in which they differ, and what to do."""
    found = []
    for kind, before in asdict(picture).items():
        now = asdict(page)[kind]
        gone, new = ([each for each in one if each not in other] for one, other in ((before, now), (now, before)))
        gone, new = ([each for each in one if not BY_CHANCE.fullmatch(each)] for one in (gone, new))
        if gone or new:
            found.append(f"{kind} are new: {new}, gone: {gone}. Take it again: python -m tests.browser.pictures")
    return found


def watched(browser: Browser, server: Server) -> Iterator[View]:
    """A training cell, alone and with the sidebar beside it."""
    lab = opened(browser, server, [LOAD, DATA, TRAIN], height=1400)
    lab.run(1)
    lab.wait_idle(1)
    lab.run(2)
    epoch = lab.page.locator(".jd-outer").first
    expect(epoch).to_contain_text("2/200")
    lab.page.locator(".jd-no").first.click()
    lab.page.mouse.move(0, 0)
    expect(epoch).to_contain_text("3/200")
    expect(lab.page.locator(".jd-legend").first).to_be_visible()
    expect(lab.page.locator(".jd-chart")).to_have_count(2)
    yield View("live-view", lab, lab.cell(2), TRAIN)
    lab.page.locator(".jd-no").first.click()
    lab.page.set_viewport_size({"width": 1280, "height": 960})
    panel = lab.panel()
    panel.get_by_label("Strategy", exact=True).select_option("ddp")
    panel.get_by_label("Ranks", exact=True).select_option("ranks")
    panel.get_by_label("Number", exact=True).fill("4")
    panel.get_by_label("Number", exact=True).press("Enter")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 4 --strategy ddp")
    expect(panel.get_by_role("button", name="The notebook's own default")).to_be_visible()
    run = panel.locator(".jp-Distributed-run").first
    expect(run.get_by_role("progressbar")).to_be_visible()
    yield View("sidebar", lab, lab.page.locator("#main"), TRAIN)
    if run.get_by_role("button", name="Stop").count():  # taking the pictures may have taken longer than the training
        run.get_by_role("button", name="Stop").click()
    lab.wait_idle(2)
    lab.close()


def stalled(browser: Browser, server: Server) -> Iterator[View]:
    """A run in which nothing moves."""
    lab = opened(browser, server, [LOAD, "import torch, jupyter_distrib", STALL], height=860)
    lab.run(1)
    lab.wait_idle(1)
    lab.run(2)
    expect(lab.page.locator(".jd-stall")).to_contain_text("load_batch")
    expect(lab.page.locator(".jd-place")).to_have_count(2)
    yield View("stall", lab, lab.cell(2), STALL)
    lab.page.locator(".jd-stop").click()
    expect(lab.ended(2)).to_contain_text("KeyboardInterrupt")
    lab.close()


def first_training(browser: Browser, server: Server) -> Iterator[View]:
    """The cells of docs/first-training.md, and what they show."""
    page = (TOP / "docs" / "first-training.md").read_text("utf-8")
    cells = re.findall(r"```(?:python|ipython)\n(.*?)\n```", page, re.DOTALL)
    lab = opened(browser, server, cells, height=1000, width=1100, scale=1.2)
    pictures = {
        "def make_model": None,
        "--keep model": "view",
        "step == 20": "error",
        "10_000": "stop",
        "--sweep": "sweep",
    }
    for index, code in enumerate(cells):
        name = next((value for words, value in pictures.items() if words in code), None)
        lab.run(index)
        if name == "stop":
            expect(lab.cell(index).locator(".jd-stop")).to_be_visible()
            expect(lab.cell(index)).to_contain_text(re.compile(r"[2-9]\d/10"))
            lab.page.locator(".jd-stop").last.click()
        lab.wait_idle(index)
        if name:
            lab.page.mouse.move(0, 0)
            yield View(f"first-{name}", lab, lab.output(index), code)
    lab.close()


class Film:
    """Frames of a part of a page, as long as each was to be seen."""

    def __init__(self, lab: Lab, target: Locator, *, filmed: bool) -> None:
        self.lab = lab
        self.filmed = filmed
        box = target.bounding_box()
        assert box
        self.clip = box
        self.frames: list[Image.Image] = []
        self.at_s: list[float] = []

    def roll(self, seconds: float) -> None:
        """Take frames for this time, as fast as the page gives them, at most five a second."""
        end = time.monotonic() + (seconds if self.filmed else 0)
        while time.monotonic() < end:
            self.at_s.append(time.monotonic())
            shot = self.lab.page.screenshot(clip=self.clip)  # type: ignore[arg-type]
            self.frames.append(Image.open(io.BytesIO(shot)).convert("RGB"))
            self.lab.page.wait_for_timeout(200)

    def save(self, path: Path, shown: Shown) -> None:
        palette = self.frames[len(self.frames) // 2].quantize(128, kmeans=2, dither=Image.Dither.NONE)
        frames = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in self.frames]
        lasts_ms = [
            min(SLOWEST_MS, round(1000 * (after - at))) for at, after in zip(self.at_s, self.at_s[1:], strict=False)
        ]
        comment = json.dumps(asdict(shown)).encode()
        frames[0].save(
            path,
            save_all=True,
            append_images=frames[1:],
            duration=[*lasts_ms, 3000],
            loop=0,
            optimize=True,
            comment=comment,
        )


def animated(browser: Browser, server: Server, *, filmed: bool = False) -> Iterator[View]:
    """A training cell, its live view, Stop, and the next cell; `filmed` writes the animation, else nothing waits for it."""
    setup = DATA.replace("import torch\n", "import torch, jupyter_distrib\n")
    lab = opened(browser, server, [LOAD, setup, SHORT, NEXT], height=760, width=900, scale=1)
    lab.run(1)
    lab.wait_idle(1)
    lab.select(2)
    lab.cell(2).evaluate("node => node.scrollIntoView()")
    film = Film(lab, lab.page.locator(".jp-NotebookPanel-notebook"), filmed=filmed)
    film.roll(1)
    lab.run(2)
    film.roll(1)
    expect(lab.page.locator(".jd-chart")).to_be_visible()
    film.roll(6)
    expect(lab.page.locator(".jd-shares").first).to_be_visible()
    view = View("running", lab, lab.page.locator("#main"), f"{SHORT}\n{NEXT}")
    shown = view.shown()
    yield view
    lab.page.locator(".jd-stop").hover()
    film.roll(0.6)
    lab.page.locator(".jd-stop").click()
    film.roll(2)
    lab.wait_idle(2)
    lab.run(3)
    lab.wait_idle(3)
    lab.cell(3).evaluate("node => node.scrollIntoView({block: 'end'})")
    film.roll(2)
    if filmed:
        film.save(IMAGES / "running.gif", shown)
    lab.close()


SCENES: tuple[Scene, ...] = (watched, stalled, first_training, animated)


def opened(
    browser: Browser, server: Server, cells: list[str], *, height: int, width: int = 1280, scale: float = 1.5
) -> Lab:
    server.notebook("train.ipynb", cells)
    lab = Lab(browser, server, "train.ipynb", height=height, scale=scale)
    lab.page.set_viewport_size({"width": width, "height": height})
    lab.load_extension()
    lab.do("filebrowser:toggle-main")
    return lab


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
