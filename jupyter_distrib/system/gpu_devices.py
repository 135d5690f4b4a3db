"""Looks for GPUs of this machine without asking a driver, which may have to wake them. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

DEVICES = Path("/dev")
_NAMES = ("nvidiactl", "nvhost-ctrl", "dxg", "kfd", "dri")
"""Devices of drivers: of NVIDIA, of NVIDIA on Jetson, of any maker under WSL, of AMD, of Intel."""


def may_exist() -> bool:
    """Return whether this machine may have GPUs; if not, cells run on its CPU."""
    return any(map(os.path.exists, map(DEVICES.joinpath, _NAMES)))
