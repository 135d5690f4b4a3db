"""Run a notebook in a real kernel, show its outputs in the terminal as they come, and save it with them.

Usage: python run.py NOTEBOOK [SAVED]

Where a display is updated in place (the live view of a distributed cell), a terminal redraws it, and a file or a pipe
gets its last state. The notebook is saved also when a cell fails; then the exit status is 1. One process, no threads of
its own; the kernel is a child that ends with it.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

CELL_TIMEOUT_S = 600
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Terminal:
    """Where outputs are shown: lines stay, except those of the one display that is updated in place."""

    def __init__(self) -> None:
        self._redraws = sys.stdout.isatty()
        self._open: str | None = None
        """The display id of what was drawn last; it can be redrawn, or (in a pipe) is still to be printed."""
        self._text = ""

    def write(self, text: str) -> None:
        self.settle()
        print(text, end="", flush=True)

    def draw(self, text: str, display: str | None) -> None:
        """Show a display; with an id, later calls of that id take its place while nothing else was written."""
        if display is None:
            self.write(text.rstrip("\n") + "\n")
            return
        if display != self._open:
            self.settle()
            self._open = display
        elif self._redraws:
            print(f"\x1b[{self._text.count(chr(10))}F\x1b[J", end="")
        self._text = text.rstrip("\n") + "\n"
        if self._redraws:
            width = shutil.get_terminal_size().columns - 1
            self._text = "".join(f"{ESCAPES.sub('', line)[:width]}\n" for line in self._text.splitlines())
            print(self._text, end="", flush=True)

    def settle(self) -> None:
        """What is shown now stays."""
        if self._open is not None and not self._redraws:
            print(self._text, end="", flush=True)
        self._open = None


class LiveClient(NotebookClient):
    """Runs a notebook and passes everything that a person would see on to a terminal."""

    terminal: Terminal

    def process_message(self, msg: dict[str, Any], cell: nbformat.NotebookNode, cell_index: int) -> Any:
        content = msg["content"]
        match msg["msg_type"]:
            case "stream":
                self.terminal.write(content["text"])
            case "display_data" | "execute_result" | "update_display_data":
                if text := content["data"].get("text/plain"):
                    self.terminal.draw(text, content.get("transient", {}).get("display_id"))
            case "error":
                self.terminal.write("\n".join(content["traceback"]) + "\n")
        return super().process_message(msg, cell, cell_index)


def run(notebook: Path, saved: Path, sockets: str) -> bool:
    """Run all cells, in the notebook's own folder; False if one failed. The kernel is reached by sockets in a folder
    that only this user can open."""
    document = nbformat.read(notebook, as_version=4)
    client = LiveClient(
        document,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        # Not the default TCP, whose traffic other users of the machine could read.
        config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
        resources={"metadata": {"path": str(notebook.resolve().parent)}},
        on_cell_start=lambda cell, **_: show_source(cell),
        on_cell_complete=lambda **_: client.terminal.settle(),
    )
    client.terminal = Terminal()
    try:
        client.execute()
    except CellExecutionError:
        return False  # its traceback was shown when it came
    finally:
        nbformat.write(document, saved)
        print(f"\nSaved with its outputs: {saved}")
    return True


def show_source(cell: nbformat.NotebookNode) -> None:
    """Print a cell before it runs: text as it is, code behind a bar."""
    bar = "│ " if cell.cell_type == "code" else ""
    print("\n" + "\n".join(bar + line for line in cell.source.splitlines()) + "\n", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3}:
        sys.exit(__doc__)
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else source.with_suffix(".executed.ipynb")
    with tempfile.TemporaryDirectory() as private:
        sys.exit(0 if run(source, target, private) else 1)
