"""Takes the pictures of the README, of real runs in JupyterLab: `.venv-browser/bin/python -m tests.browser.pictures`."""

from __future__ import annotations

import os

from playwright.sync_api import Browser, expect

from tests.browser.lab import TOP, Lab, Server, serving

IMAGES = TOP / "docs" / "images"
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
for epoch in jupyter_distrib.progress(range(60), label="epoch"):
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


def main() -> None:
    os.environ["PYTHONWARNINGS"] = "ignore"  # torch without numpy
    with serving({"python3": None}) as (browser, server):
        watched(browser, server)
        stalled(browser, server)


def watched(browser: Browser, server: Server) -> None:
    """A training cell, alone and with the sidebar beside it."""
    lab = opened(browser, server, [LOAD, DATA, TRAIN], height=1080)
    lab.do("filebrowser:toggle-main")
    lab.run(1)
    lab.wait_idle(1)
    lab.run(2)
    epoch = lab.page.locator(".jd-outer").first
    expect(epoch).to_contain_text("2/60")
    lab.page.locator(".jd-no").first.click()
    expect(epoch).to_contain_text("4/60")
    lab.cell(2).screenshot(path=str(IMAGES / "live-view.png"))
    lab.page.locator(".jd-no").first.click()
    lab.page.set_viewport_size({"width": 1280, "height": 960})
    panel = lab.panel()
    panel.get_by_label("Strategy", exact=True).select_option("ddp")
    panel.get_by_label("Ranks", exact=True).select_option("ranks")
    panel.get_by_label("Number", exact=True).fill("4")
    panel.get_by_label("Number", exact=True).press("Enter")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 4 --strategy ddp")
    run = panel.locator(".jp-Distributed-run").first
    expect(run.get_by_role("progressbar")).to_be_visible()
    lab.page.screenshot(path=str(IMAGES / "sidebar.png"))
    run.get_by_role("button", name="Stop").click()
    expect(lab.ended(2)).to_contain_text("KeyboardInterrupt")
    lab.close()


def stalled(browser: Browser, server: Server) -> None:
    """A run in which nothing moves, in the dark theme."""
    lab = opened(browser, server, [LOAD, "import torch, jupyter_distrib", STALL], height=860)
    lab.dark()
    lab.do("filebrowser:toggle-main")
    lab.run(1)
    lab.wait_idle(1)
    lab.run(2)
    expect(lab.page.locator(".jd-stall")).to_contain_text("load_batch")
    expect(lab.page.locator(".jd-place")).to_have_count(2)
    lab.cell(2).screenshot(path=str(IMAGES / "live-view-stall-dark.png"))
    lab.page.locator(".jd-stop").click()
    expect(lab.ended(2)).to_contain_text("KeyboardInterrupt")
    lab.close()


def opened(browser: Browser, server: Server, cells: list[str], *, height: int) -> Lab:
    server.notebook("train.ipynb", cells)
    lab = Lab(browser, server, "train.ipynb", height=height, scale=1.5)
    lab.load_extension()
    return lab


if __name__ == "__main__":
    main()
