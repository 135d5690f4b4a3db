"""GPUs of other makers, from files as their drivers write them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.agent.gpus import choice as gpu_choice
from jupyter_distrib.agent.gpus import other_makers
from jupyter_distrib.agent.gpus.devices import Inventory
from jupyter_distrib.agent.gpus.torch_build import TorchBuild, parse
from jupyter_distrib.agent.ranks import starter
from jupyter_distrib.interfaces import identity
from jupyter_distrib.wire import messages as m

ROCM = TorchBuild(hip="6.4.43482")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def two_amd_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with one processor and two GPUs, of which the driver numbers the second 10."""
    nodes, drm = tmp_path / "nodes", tmp_path / "drm"
    write(nodes / "0" / "gpu_id", "0\n")
    for number, minor in (("1", 128), ("10", 129)):
        node = nodes / number
        write(node / "gpu_id", f"5{minor}\n")
        write(node / "name", "aldebaran\n")
        write(node / "properties", f"simd_count 440\nunique_id {0xABC0 + minor}\ndrm_render_minor {minor}\n")
        write(node / "mem_banks" / "0" / "properties", "heap_type 1\nsize_in_bytes 68702699520\nflags 0\n")
        write(node / "mem_banks" / "1" / "properties", "heap_type 0\nsize_in_bytes 7\n")
        write(drm / f"renderD{minor}" / "device" / "mem_info_vram_used", "11534336\n")
    write(drm / "renderD128" / "device" / "product_name", "AMD Instinct MI250X\n")
    monkeypatch.setattr(other_makers, "TOPOLOGY", nodes)
    monkeypatch.setattr(other_makers, "DRM", drm)


@pytest.mark.usefixtures("two_amd_gpus")
def test_a_torch_for_rocm_has_the_gpus_of_the_kernel_driver() -> None:
    found = other_makers.inventory(ROCM)

    assert [(gpu.index, gpu.name, gpu.uuid) for gpu in found.gpus] == [
        (0, "AMD Instinct MI250X", "GPU-000000000000ac40"),
        (1, "AMD aldebaran", "GPU-000000000000ac41"),
    ]
    assert {gpu.memory_bytes for gpu in found.gpus} == {68702699520}
    assert {gpu.used_bytes for gpu in found.gpus} == {11534336}


@pytest.mark.usefixtures("two_amd_gpus")
def test_its_ranks_are_on_cuda_devices_by_their_numbers() -> None:
    command = m.OpenWorkerGroup(group="c1", size=2, gpus=True)
    choice = gpu_choice.choose(command, other_makers.inventory(ROCM), ROCM)
    order = starter.worker_order(command, 1, 1, choice.alternatives[0], 2)

    assert (order.device, order.visible_devices) == ("cuda:1", "0,1")
    replaced = starter.worker_order(command, 1, 3, choice.alternatives[0], 2)
    assert replaced.visible_devices == "0,1", "HIP knows no UUIDs there"


@pytest.mark.usefixtures("two_amd_gpus")
@pytest.mark.parametrize(("build", "kind"), [(TorchBuild(cuda="12.8"), "CUDA 12.8"), (TorchBuild(), "the CPU")])
def test_a_torch_for_others_has_none_of_them_and_says_so(build: TorchBuild, kind: str) -> None:
    found = other_makers.inventory(build)
    assert found.gpus == ()
    choice = gpu_choice.choose(m.OpenWorkerGroup(group="c1", size=0, gpus=True), found, build)
    (note,) = choice.notes
    assert note == (
        "CPU ranks: this machine has 1 AMD Instinct MI250X, 1 AMD aldebaran, and the torch of these ranks is built for "
        f"{kind}; install a torch for ROCm to use it."
    )


@pytest.fixture
def two_intel_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards, of which the driver has numbered that with the higher address first; and a GPU of AMD."""
    drm = tmp_path / "drm"
    for minor, address, vendor in (
        (128, "0000:9a:00.0", "0x8086"),
        (129, "0000:03:00.0", "0x8086"),
        (130, "0000:01:00.0", "0x1002"),
    ):
        device = tmp_path / "pci" / address
        write(device / "vendor", f"{vendor}\n")
        write(device / "device", "0x56c0\n")
        (drm / f"renderD{minor}").mkdir(parents=True)
        (drm / f"renderD{minor}" / "device").symlink_to(device)
    monkeypatch.setattr(other_makers, "DRM", drm)


XPU = TorchBuild(xpu="20250101")


@pytest.mark.usefixtures("two_intel_gpus")
@pytest.mark.parametrize("size", [0, 2])
def test_a_torch_for_xpu_has_intels_gpus_in_the_order_of_the_bus(size: int) -> None:
    command = m.OpenWorkerGroup(group="c1", size=size, gpus=True)
    choice = gpu_choice.choose(command, other_makers.inventory(XPU), XPU)
    order = starter.worker_order(replace(command, size=2), 1, 1, choice.alternatives[0], 2)

    assert choice.size == 2
    assert [gpu.uuid for gpu in choice.alternatives[0]] == ["GPU-intel-0000:03:00.0", "GPU-intel-0000:9a:00.0"]
    assert [gpu.name for gpu in choice.alternatives[0]] == ["Intel GPU 0x56c0"] * 2
    assert (order.device, order.visible_devices) == ("xpu:1", "0,1")


@pytest.mark.usefixtures("two_intel_gpus")
def test_without_a_torch_for_xpu_cards_are_reported() -> None:
    remark = other_makers.inventory(TorchBuild()).remark
    assert remark.endswith("is built for the CPU; install a torch for XPU to use it.")


def test_a_gpu_in_the_processor_is_left_out_beside_cards_and_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(*addresses: str) -> list[tuple[str, str]]:
        drm = tmp_path / f"drm{len(addresses)}"
        for minor, address in enumerate(addresses):
            write(tmp_path / "pci" / address / "vendor", "0x8086\n")
            (drm / f"renderD{minor}").mkdir(parents=True)
            (drm / f"renderD{minor}" / "device").symlink_to(tmp_path / "pci" / address)
        monkeypatch.setattr(other_makers, "DRM", drm)
        return [(gpu.uuid, gpu.cuda_word) for gpu in other_makers.intel_gpus()]

    assert seen("0000:00:02.0") == [("GPU-intel-0000:00:02.0", "0")]
    assert other_makers.inventory(TorchBuild()) == Inventory()
    assert seen("0000:00:02.0", "0000:03:00.0") == [("GPU-intel-0000:03:00.0", "1")], "Level Zero counts both"


def test_ranks_on_intels_gpus_see_those_of_their_worker_group(monkeypatch: pytest.MonkeyPatch) -> None:
    order = m.WorkerOrder(
        group="g", worker="g.0.1", agent_pid=1, rank=0, world_size=2, local_rank=0, local_world_size=2,
        device="xpu:0", visible_devices="1,3",
    )  # fmt: skip
    monkeypatch.setattr(identity, "_order", order)
    assert (
        identity.environment().items()
        >= {
            "ZE_AFFINITY_MASK": "1,3",
            "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
            "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
            "CUDA_VISIBLE_DEVICES": "",
        }.items()
    )


def test_apples_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")

    assert "torch.device('mps')" in other_makers.inventory(TorchBuild()).remark


def test_what_torch_says_of_its_build() -> None:
    text = dedent("""\
        __version__ = '2.13.0'
        cuda: Optional[str] = {}
        git_version = 'a'
        hip: Optional[str] = {}
        xpu: Optional[str] = None
    """)
    assert parse(text.format("'12.8'", "None")) == TorchBuild(cuda="12.8")
    assert parse(text.format("None", "'6.4.43482'")) == ROCM
    assert parse("something else") == TorchBuild(known=False)
    assert parse("something else").uses("NVIDIA"), "nothing is refused on a guess"
    assert not parse(text.format("None", "None")).uses("NVIDIA")
    assert not ROCM.uses("NVIDIA")
