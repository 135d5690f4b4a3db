"""Ranks are bound to the processors of the NUMA node of their GPU."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

from tests.gpu_bed import GpuBed

pytestmark = pytest.mark.slow

CPUS = sorted(os.sched_getaffinity(0))[:2]


@pytest.mark.skipif(len(CPUS) < 2, reason="it needs two processors")
def test_each_rank_runs_near_its_gpu_until_a_cell_without_the_option(tmp_path: Path) -> None:
    for node, cpu in enumerate(CPUS):
        (gpu := tmp_path / f"bus/pci/devices/0000:{node + 1}c:00.0").mkdir(parents=True)
        (gpu / "numa_node").write_text(f"{node}\n")
        (place := tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpu}\n")
    with GpuBed(count=2) as bed:
        for node, gpu_state in enumerate(bed.gpus):
            gpu_state["address"] = f"00000000:{node + 1}C:00.0"
        bed.write()
        with bed.notebook() as book:
            book.ok(
                dedent(f"""\
                    %%distributed --gpus 2
                    import os
                    from pathlib import Path
                    from jupyter_distrib.worker.environment import numa
                    numa.SYS = Path({str(tmp_path)!r})""")
            )
            cell = "import os\nsorted(os.sched_getaffinity(0))"
            bound = book.ok(f"%%distributed --gpus 2 --numa-binding node\n{cell}")
            assert bound.result.splitlines() == [f"rank {rank}: [{cpu}]" for rank, cpu in enumerate(CPUS)]
            free = book.ok(f"%%distributed --gpus 2\n{cell}")
            assert f"[{CPUS[0]}, {CPUS[1]}" in free.result
            said = book.ok(f"%%distributed --ranks 1 --numa-binding node\n{cell}")
            assert "--numa-binding node has no effect here: this rank has no GPU." in said.text
