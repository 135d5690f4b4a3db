"""Which GPUs a cell is given, by what is there, and what it says of that."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

from tests.gpu_bed import GIB, GpuBed
from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # each test starts an agent of its own

VISIBLE = "import os\nos.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER'], str(device)"


@pytest.fixture
def bed(shared_bed: GpuBed) -> GpuBed:
    return shared_bed


@pytest.fixture
def book(shared_book: Notebook) -> Notebook:
    return shared_book


def hide(book: Notebook, words: str) -> None:
    book.ok(f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = {words!r}")


# ---------------------------------------------------------------------------------------------------- what ranks see


def test_ranks_see_numbers_in_the_order_of_the_bus(book: Notebook) -> None:
    """Libraries read `int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0])`."""
    hide(book, "5,3")

    assert book.ok(f"%%distributed --gpus 2\n{VISIBLE}").result.splitlines() == [
        "rank 0: ('5,3', 'PCI_BUS_ID', 'cuda:0')",
        "rank 1: ('5,3', 'PCI_BUS_ID', 'cuda:1')",
    ]


def test_ranks_are_where_the_numbers_say_though_cuda_counts_otherwise(bed: GpuBed, book: Notebook) -> None:
    bed.use(6, speed=9, name="NVIDIA H200")
    hide(book, "0,6")

    outcome = book.ok("%%distributed --gpus 2\n1")
    assert sorted(bed.numbers().values()) == [[0], [6]]
    assert (
        "CUDA_VISIBLE_DEVICES=0,6 is read in nvidia-smi's numbering: 0 is the NVIDIA H100 80GB HBM3, 6 is the NVIDIA H200."
        in outcome.view
    )


def test_gpus_of_other_jobs_are_not_counted(bed: GpuBed, book: Notebook) -> None:
    """A scheduler that shuts them off sets CUDA_VISIBLE_DEVICES to numbers among those that are left."""
    for gpu in bed.gpus[:4]:
        gpu["permitted"] = False
    bed.write()
    hide(book, "0,1")

    assert "cannot be used" not in book.ok("%%distributed --gpus 2\n1").view
    assert sorted(bed.numbers().values()) == [[4], [5]]


# ---------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize("words", ["9", "0,9", "GPU-nowhere", "MIG-1234", "all"])
@pytest.mark.parametrize("line", ["", " --gpus 1"])
def test_words_that_name_no_gpu_are_an_error(book: Notebook, words: str, line: str) -> None:
    hide(book, words)

    refused = book.fails(f"%%distributed{line}\n1")
    assert refused.evalue == (
        f"CUDA_VISIBLE_DEVICES={words} names {words.rsplit(',', maxsplit=1)[-1]}, but this machine has GPUs 0-7 only "
        "(8 NVIDIA H100 80GB HBM3): correct it, or delete it from os.environ."
    )
    assert book.ok("%%distributed --ranks 2\nstr(device)").result == "ranks 0-1: 'cpu'"


@pytest.mark.parametrize("words", ["", " ", "-1", "NoDevFiles"])
def test_words_that_hide_all_gpus_mean_cpu_ranks(book: Notebook, words: str) -> None:
    hide(book, words)

    asked = book.ok("%%distributed --gpus 2\n1").view
    assert "2 CPU ranks (gloo)" in asked
    assert f"CUDA_VISIBLE_DEVICES={words!r} hides GPUs 0-7: change it in the notebook" in asked
    assert book.ok("%%distributed\nstr(device)").result == "ranks 0-1: 'cpu'"


def test_the_notebook_changes_its_visible_gpus_between_cells(bed: GpuBed, book: Notebook) -> None:
    """Ranks that keep values stay as they are; what the variable says holds for those that are started next."""
    assert book.ok("%%distributed --gpus 4 --keep w\nw = rank").status == "ok"
    for words, ranks in (("4,5", 2), ("5", 1), ("4, ,6", 2), (bed.gpus[7]["uuid"], 1)):
        hide(book, words)
        assert book.ok(f"%%distributed --gpus {ranks}\nstr(device)").result.endswith(f"'cuda:{ranks - 1}'")
        held = [*bed.numbers().values()]
        assert all([number] in held for number in (0, 1, 2, 3)), "kept values are"
    hide(book, "rubbish")
    assert "names rubbish" in book.fails("%%distributed --gpus 1\n1").evalue
    book.ok("del os.environ['CUDA_VISIBLE_DEVICES']")
    assert book.ok("%%distributed --gpus 4\nw").result.splitlines()[-1] == "rank 3: 3"
    assert bed.violations() == []


def test_a_word_that_names_a_lost_gpu_says_so(bed: GpuBed, book: Notebook) -> None:
    bed.use(3, lost=True)
    hide(book, "2,3")

    assert book.fails("%%distributed\n1").evalue == (
        "CUDA_VISIBLE_DEVICES=2,3 names 3, but GPU 3 cannot be used (GPU is lost): leave it out."
    )


# ---------------------------------------------------------------------------------------------------- bad input


def test_more_gpus_than_there_are(book: Notebook) -> None:
    assert book.fails("%%distributed --gpus 9\n1").evalue == (
        "--gpus 9 but 8 GPUs are visible here; ask for at most that many."
    )


def test_a_type_that_is_not_there(book: Notebook) -> None:
    assert book.fails("%%distributed --gpus 1 --gpu-type A100\n1").evalue == (
        "--gpu-type A100, but this machine has 8 NVIDIA H100 80GB HBM3; leave it out, or use another pool."
    )


def test_a_torch_for_the_cpu_beside_gpus() -> None:
    with GpuBed(count=8, torch="cpu") as bed, bed.notebook() as book:
        outcome = book.ok("%%distributed\nstr(device)")
        assert outcome.result == "ranks 0-1: 'cpu'"
        problem = "the torch of these ranks is built for the CPU, and this machine has 8 NVIDIA H100 80GB HBM3"
        assert f"CPU ranks: {problem}" in outcome.view
        assert book.fails("%%distributed --gpus 1 --fresh\n1").evalue == (
            f"--gpus 1, but {problem}: install a torch for CUDA, or use --ranks N."
        )
        assert problem in book.ok("%distributed_status").result


def test_a_driver_that_is_too_old() -> None:
    with GpuBed(count=8, cuda_driver=11040) as bed, bed.notebook() as book:
        problem = "the GPU driver is too old: it supports CUDA 11.4, and this torch is built for CUDA 12.8"
        assert book.fails("%%distributed --gpus 1\n1").evalue.startswith(f"--gpus 1, but {problem}; update the driver")
        outcome = book.ok("%%distributed\nstr(device)")
        assert outcome.result == "ranks 0-1: 'cpu'"
        assert problem in outcome.view


# ---------------------------------------------------------------------------------------------------- others


def test_gpus_that_others_use_come_last_and_are_named(bed: GpuBed, book: Notebook) -> None:
    bed.use(0, used_bytes=70 * GIB)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        bed.use(1, processes=[{"pid": other.pid, "used_bytes": 30 * GIB}])
        few = book.ok("%%distributed --gpus 2\n1")
        assert sorted(bed.numbers().values()) == [[2], [3]]
        assert "in use already" not in few.view
        every = book.ok("%%distributed --gpus 8\n1")
        other.communicate()

    assert "GPU 0: 75.2 GB of 85.9 GB are in use already, by others." in every.view
    assert f"GPU 1: 32.2 GB of 85.9 GB are in use already, by process {other.pid} (python" in every.view
    assert "in use already" not in book.ok("%%distributed --gpus 8\n1").view, "said once"


def test_the_kernel_itself_is_named(bed: GpuBed, book: Notebook) -> None:
    bed.use(0, processes=[{"pid": book.pid, "used_bytes": 30 * GIB}])

    assert "are in use already, by this notebook's own kernel." in book.ok("%%distributed --gpus 8\n1").view


def test_ranks_that_made_room_are_not_reported_as_others(bed: GpuBed, book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --gpus 8
            import feigned_cuda
            feigned_cuda.hold(40 << 30)""")
    )

    assert "in use already" not in book.ok("%%distributed --gpus 8 --fresh\n1").view
    assert "in use already" not in book.ok("%%distributed --gpus 7\n1").view


# ---------------------------------------------------------------------------------------------------- unlike GPUs


def mixed(bed: GpuBed) -> None:
    bed.gpus = [bed.gpu(0, name="NVIDIA T400", memory_bytes=4 * GIB, display=True)]
    bed.gpus += [bed.gpu(index, name="NVIDIA A10") for index in (1, 2)]
    bed.write()


def test_the_commonest_type_is_the_default(bed: GpuBed, book: Notebook) -> None:
    mixed(bed)

    outcome = book.ok("%%distributed\nworld_size")
    assert outcome.result == "ranks 0-1: 2"
    assert sorted(bed.numbers().values()) == [[1], [2]]
    assert "of 1 NVIDIA T400, 2 NVIDIA A10, these ranks use NVIDIA A10; --gpu-type selects another one." in outcome.view


def test_one_gpu_is_one_of_the_commonest_type(bed: GpuBed, book: Notebook) -> None:
    mixed(bed)
    book.ok("%%distributed --gpus 1\n1")

    assert list(bed.numbers().values()) == [[1]]


def test_unlike_gpus_are_told_where_there_are_no_others(bed: GpuBed, book: Notebook) -> None:
    mixed(bed)

    assert "no 3 of these GPUs are alike (1 NVIDIA T400, 2 NVIDIA A10)" in book.ok("%%distributed --gpus 3\n1").view


def test_a_gpu_with_a_display_is_taken_by_number_only(bed: GpuBed, book: Notebook) -> None:
    bed.gpus = bed.gpus[:2]
    bed.use(0, display=True)

    outcome = book.ok("%%distributed\nworld_size")
    assert outcome.result == "rank 0: 1"
    assert "GPU 0 drives a display and is left out; --gpus 2 takes it, too." in outcome.view
    assert book.ok("%%distributed --gpus 2\nworld_size").result == "ranks 0-1: 2"
    bed.gpus = bed.gpus[:1]
    bed.write()
    assert book.ok("%%distributed --gpus 1 --fresh\nworld_size").result == "rank 0: 1", "the only one"


# ---------------------------------------------------------------------------------------------------- slices


def sliced(bed: GpuBed, **parent: object) -> None:
    """Two whole GPUs, and one in two slices."""
    bed.gpus = [*bed.gpus[:2], bed.gpu(2, mig_mode=1, mig=[bed.slice(2, 0), bed.slice(2, 1)], **parent)]
    bed.write()


def test_slices_are_gpus_by_uuid_and_each_rank_sees_its_own(bed: GpuBed, book: Notebook) -> None:
    sliced(bed, memory="NO_PERMISSION")
    uuids = [piece["uuid"] for piece in bed.gpus[2]["mig"]]
    hide(book, ",".join(uuids))

    assert book.ok(f"%%distributed\n{VISIBLE}").result.splitlines() == [
        f"rank {rank}: ('{uuid}', 'PCI_BUS_ID', 'cuda:0')" for rank, uuid in enumerate(uuids)
    ]
    assert sorted(held for [held] in bed.contexts().values()) == uuids
    status = book.ok("%distributed_status").result
    assert "2:1" in status
    assert "MIG slice" in status


def test_whole_gpus_are_the_default_beside_slices_and_are_named_by_uuid(bed: GpuBed, book: Notebook) -> None:
    sliced(bed)

    outcome = book.ok(f"%%distributed\n{VISIBLE}")
    assert ",".join(gpu["uuid"] for gpu in bed.gpus[:2]) in outcome.result
    assert book.ok("%%distributed --gpus 2 --gpu-type MIG\nworld_size").result == "ranks 0-1: 2"


def test_a_divided_gpu_without_slices_is_left_out(bed: GpuBed, book: Notebook) -> None:
    bed.use(7, mig_mode=1)

    outcome = book.ok("%%distributed\nworld_size")
    assert outcome.result == "ranks 0-6: 7"
    assert "GPU 7 cannot be used (it is in MIG mode and has no slices); it is left out." in outcome.view


def test_compute_mode_and_mps_are_reported(bed: GpuBed, book: Notebook) -> None:
    bed.use(0, compute_mode=3)
    bed.use(1, mps=True, processes=[{"pid": 1, "used_bytes": 1}])
    bed.use(2, compute_mode=2)

    assert book.ok("%%distributed --gpus 7\nworld_size").result == "ranks 0-6: 7"
    assert book.ok("%%distributed --gpus 7 --fresh\nworld_size").result == "ranks 0-6: 7", "one process at a time"
    status = book.ok("%distributed_status").result
    assert "exclusive process" in status
    assert "MPS" in status
    assert "its compute mode is PROHIBITED" in status
    report = book.ok("%distributed_status --doctor").result
    assert "GPU 0: exclusive process; GPU 1: MPS" in report
    assert "GPU 2 cannot be used (its compute mode is PROHIBITED)." in report
