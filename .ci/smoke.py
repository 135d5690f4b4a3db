"""Run one distributed cell through a real kernel of this interpreter, with the package as it was installed.

Usage: python smoke.py FOLDER, where FOLDER is the one that `jupyter_distrib` must have come from.
"""

from __future__ import annotations

import sys
from typing import Any

from jupyter_client.manager import start_new_kernel

CELL = """\
%%distributed --ranks 2 --strategy ddp
import torch
total = torch.tensor([rank + 1.0])
torch.distributed.all_reduce(total)
total.item()
"""


def main(folder: str) -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        for source in (
            f"import jupyter_distrib as package\nassert package.__file__.startswith({folder!r}), package.__file__",
            "%load_ext jupyter_distrib",
            CELL,
            "assert list(_) == [3.0, 3.0], _",
        ):
            printed: list[str] = []
            reply = client.execute_interactive(
                source, timeout=120, output_hook=lambda m, p=printed: p.append(text_of(m))
            )
            if reply["content"]["status"] != "ok":
                sys.exit(f"This cell failed with the installed wheel:\n{source}\n\n{''.join(printed)}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    print("The wheel works without its source tree: 2 ranks, one all_reduce.")


def text_of(message: dict[str, Any]) -> str:
    """What a terminal would show of one message from the kernel."""
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            return str(content["text"])
        case "error":
            return "\n".join(content["traceback"])
        case "display_data" | "execute_result":
            return str(content["data"].get("text/plain", "")) + "\n"
        case _:
            return ""


if __name__ == "__main__":
    main(sys.argv[1])
