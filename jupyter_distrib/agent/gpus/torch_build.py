"""Reads the kind of GPU that torch was built for from its files: the agent does not import torch."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The versions listed in torch's `version.py`, each empty if torch was built without that library."""

    cuda: str = ""
    """Version of CUDA: `12.8`."""
    hip: str = ""
    xpu: str = ""
    known: bool = True
    """Whether the file could be read; if not, no GPU is refused because of it."""

    def uses(self, maker: Literal["NVIDIA", "AMD", "Intel"]) -> bool:
        """Return whether its ranks can use GPUs of this maker."""
        return bool({"NVIDIA": self.cuda, "AMD": self.hip, "Intel": self.xpu}[maker]) or not self.known


@cache
def torch_build() -> TorchBuild:
    """Return the build of the torch that this interpreter imports."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or spec.loader is None:
        return TorchBuild(known=False)
    try:
        data: bytes = spec.loader.get_data(str(Path(spec.origin).parent / "version.py"))  # type: ignore[attr-defined]  # of loaders from files
    except (OSError, AttributeError):
        return TorchBuild(known=False)
    return parse(data.decode(errors="replace"))


def parse(version_file: str) -> TorchBuild:
    """Read torch's `version.py`: `cuda: Optional[str] = '12.8'`, `hip: Optional[str] = None`, ..."""
    found = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*(None|'[^']*'|\"[^\"]*\")", version_file, re.MULTILINE))
    return TorchBuild(
        **{name: "" if value == "None" else value.strip("'\"") for name, value in found.items()}, known="cuda" in found
    )
