"""Lists the GPUs of AMD and Intel that ranks can use, from files of the system. Any thread.

A torch that is built for ROCm calls AMD's GPUs `cuda:0` and so on, and its ranks go by CUDA_VISIBLE_DEVICES like
others (rocm.docs.amd.com, "GPU isolation techniques"); the numbers come from the kernel driver's topology. A torch
for XPU calls Intel's GPUs `xpu:0`, and its ranks go by ZE_AFFINITY_MASK; the numbers count cards in the order of the
PCI bus (oneapi-src.github.io/level-zero-spec, "Environment Variables"). Apple's GPU is only reported: no rank leases
it.
"""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.agent.gpus.devices import Gpu, Inventory, types
from jupyter_distrib.agent.gpus.torch_build import TorchBuild

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
"""Nodes with processors, GPUs or both (docs.kernel.org, amdkfd)."""
DRM = Path("/sys/class/drm")
_ON_BOARD = ("1", "2")
"""Kinds of memory banks that are the GPU's own."""
_INTEL = "0x8086"
_INTEGRATED = "0000:00:02.0"
"""Address of a GPU in Intel's processors; torch leaves it out beside cards."""
LARGE_BYTES = 4 << 30
"""Memory in bytes from which an unused GPU is worth mentioning to a user whose torch cannot use it."""


def inventory(build: TorchBuild) -> Inventory:
    """Return the inventory of a machine without an NVIDIA driver."""
    if build.hip:
        return Inventory(gpus=tuple(amd_gpus()), maker="AMD")
    if build.xpu:
        return Inventory(gpus=tuple(intel_gpus()), maker="Intel")
    return Inventory(remark=unused(build))


def unused(build: TorchBuild) -> str:
    """Return a remark on a GPU that the ranks cannot use; empty if there is none."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return (
            "ranks compute on the CPU, since torch has no collectives between tensors on Apple's GPU; a cell can use "
            "it as torch.device('mps')."
        )
    cards = [gpu for gpu in intel_gpus() if not gpu.uuid.endswith(_INTEGRATED)]
    for kind, gpus in (
        ("ROCm", [gpu for gpu in amd_gpus() if (gpu.memory_bytes or 0) >= LARGE_BYTES]),
        ("XPU", cards),
    ):
        if gpus and build.known:
            own = f"CUDA {build.cuda}" if build.cuda else "the CPU"
            return (
                f"this machine has {types(gpus)}, and the torch of these ranks is built for {own}; install a torch for "
                f"{kind} to use it."
            )
    return ""


def intel_gpus() -> list[Gpu]:
    """List Intel's GPUs in the order of the PCI bus."""
    found = [path / "device" for path in DRM.glob("renderD*") if _line(path / "device" / "vendor") == _INTEL]
    addresses = sorted(path.resolve().name for path in found)
    cards = [address for address in addresses if address != _INTEGRATED]
    names = {path.resolve().name: _line(path / "device") for path in found}
    return [
        Gpu(
            index=index,
            uuid=f"GPU-intel-{address}",
            name=f"Intel GPU {names[address]}".rstrip(),
            memory_bytes=None,
            used_bytes=None,
            cuda_word=str(index),
            only_by_number=True,
            kind="xpu",
        )
        for index, address in enumerate(addresses)
        if address in (cards or addresses)
    ]


def amd_gpus() -> list[Gpu]:
    """List AMD's GPUs in the order of the topology, which is HIP's."""
    nodes = [path for path in TOPOLOGY.glob("[0-9]*") if _line(path / "gpu_id") not in ("", "0")]
    return [_gpu(index, path) for index, path in enumerate(sorted(nodes, key=lambda path: int(path.name)))]


def _gpu(index: int, node: Path) -> Gpu:
    about = _properties(node / "properties")
    device = DRM / f"renderD{about.get('drm_render_minor', '')}" / "device"
    unique = int(about.get("unique_id") or 0)
    sizes = [_properties(bank) for bank in node.glob("mem_banks/*/properties")]
    own_bytes = sum(int(bank.get("size_in_bytes", 0)) for bank in sizes if bank.get("heap_type") in _ON_BOARD)
    used = _line(device / "mem_info_vram_used")
    return Gpu(
        index=index,
        uuid=f"GPU-{unique:016x}" if unique else f"GPU-kfd-{_line(node / 'gpu_id')}",
        name=_line(device / "product_name") or f"AMD {_line(node / 'name') or 'GPU'}",
        memory_bytes=own_bytes or None,
        used_bytes=int(used) if used.isdecimal() else None,
        address=device.resolve().name if device.exists() else "",
        cuda_word=str(index),
        only_by_number=True,
    )


def _properties(path: Path) -> dict[str, str]:
    """Read a file of lines such as `simd_count 440`; empty if it cannot be read."""
    with suppress(OSError):
        words = (line.split() for line in path.read_text().splitlines())
        return {each[0]: each[1] for each in words if len(each) == 2}
    return {}


def _line(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
