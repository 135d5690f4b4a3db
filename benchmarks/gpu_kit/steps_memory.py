"""Memory and values: a dead context, running out, what stays between cells, large values, a killed kernel."""

from __future__ import annotations

import os
import re
import signal
import time

from benchmarks.gpu_kit.place import GIB, PID, Place, is_alive, resident_bytes
from benchmarks.gpu_kit.step import Findings, step, until

MB = 1 << 20
ASSERTS = "import torch\ntorch.zeros(3, device=device)[torch.tensor([7], device=device)].sum().item()"
FEIGNED_ASSERT = "raise RuntimeError('CUDA error: device-side assert triggered')"


@step(
    "K4",
    "a rank whose CUDA context is dead is told as such and replaced before the next cell",
    limit_s=45,
    without_gpu="bed",
)
def dead_context(place: Place, find: Findings) -> None:
    one = place.ranks()
    works = "import torch\ntorch.ones(1, device=device).item()" if place.on_gpu else "1.0"
    for keeps in (False, True):
        case = "with a kept value" if keeps else "nothing kept"
        with find.going_on(case), place.notebook() as book:
            (pid,) = book.values(one, PID)
            if keeps:
                book.ok(f"%%distributed {one} --keep w\nw = 1")
            _break_contexts(place, "CUDA error: device-side assert triggered")
            failed = book.cell(f"%%distributed {one}\n{ASSERTS if place.on_gpu else FEIGNED_ASSERT}")
            _break_contexts(place, "")
            find.that(f"{case}: the assert is told", "device-side assert" in failed.text, failed.text[-300:])
            find.that(f"{case}: with the line", bool(re.search(r"line [23]\b|----> ?[23]\b|:[23]\b", failed.text)))
            find.that(f"{case}: and that the context is broken", "context" in failed.text, failed.text[-300:])
            if keeps:
                lost = book.cell(f"%%distributed {one}\nw")
                find.that("the kept value is told as lost", lost.status == "error" and "w" in lost.evalue, lost.evalue)
            after = book.cell(f"%%distributed {one} --out after\n{works}")
            find.that(f"{case}: the next cell runs", after.status == "ok", after.text[-300:])
            find.within(f"{case}: the next cell", after.wall_s, 4.0)
            (other,) = book.values(one, PID)
            find.that(f"{case}: in another process", other != pid, f"{pid}, {other}")


def _break_contexts(place: Place, error: str) -> None:
    if place.bed is not None:
        place.bed.state["synchronize"] = {"error": error, "seconds": 0.0}
        place.bed.write()


@step(
    "K5",
    "a rank that runs out of memory stays, and gives its cache back when it idles",
    limit_s=40,
    without_gpu="cpu",
)
def out_of_memory(place: Place, find: Findings) -> None:
    one, before = place.ranks(), place.used_bytes() if place.on_gpu else 0
    too_much = 2 * place.memory_bytes if place.on_gpu else 1 << 50
    most = int(0.85 * (place.memory_bytes - before)) if place.on_gpu else 400 * MB
    with place.notebook() as book:
        (pid,) = book.settled(one)
        bare = 0 if place.on_gpu else resident_bytes(pid)
        failed = book.cell(
            f"%%distributed {one}\nimport torch\ntorch.empty({too_much}, dtype=torch.uint8, device=device)"
        )
        name = "OutOfMemoryError" if place.on_gpu else "RuntimeError"
        find.that("out of memory is told by torch's error", failed.ename == name, f"{failed.ename}: {failed.evalue}")
        code = f"big = torch.ones({most}, dtype=torch.uint8, device=device)\ndel big"
        good = book.cell(f"%%distributed {one}\nimport torch\n{code}")
        find.that(f"then {most / GIB:.1f} GiB are had", good.status == "ok", good.text[-300:])
        (same,) = book.values(one, PID)
        find.that("on the same rank", same == pid, f"{pid}, {same}")
        time.sleep(2.5)  # it idles
        held = place.used_bytes() - before if place.on_gpu else resident_bytes(pid) - bare
        limit = 1.5 * GIB if place.on_gpu else 200 * MB
        find.that("what is idle is given back", held < limit, f"{held / GIB:.2f} GiB are held")


HOLDS = """
import torch
class Cyclic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.me, self.weight = self, torch.ones({size}, dtype=torch.uint8, device=device)
model = Cyclic()
"""
WANTS = """
import torch
big = torch.ones({size}, dtype=torch.uint8, device=device)
next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
"""


@step(
    "K6",
    "what the last cell left in a circle is gone when the next cell, at once, needs the memory",
    limit_s=30,
    without_gpu="cpu",
)
def run_all(place: Place, find: Findings) -> None:
    one = place.ranks()
    with place.notebook() as book:
        (pid,) = book.settled(one)
        size = int(0.6 * (place.memory_bytes - place.used_bytes())) if place.on_gpu else 600 * MB
        bare = 0 if place.on_gpu else resident_bytes(pid)
        both = (
            "_sent = [get_ipython().run_cell_magic('distributed', line, cell) for line, cell in "
            f"(({one!r}, {HOLDS.format(size=size)!r}), ({one + ' --out second'!r}, {WANTS.format(size=size)!r}))]"
        )
        outcome = book.cell(both)
        find.that(f"twice {size / GIB:.1f} GiB, one cell after the other", outcome.status == "ok", outcome.text[-300:])
        if outcome.status == "ok" and not place.on_gpu:
            held = int(book.ok("print(second[0])").stdout) - bare
            find.that("the second cell has its own alone", held < 1.5 * size, f"{held / MB:.0f} of {size / MB:.0f} MB")


VALUES = """
import torch
base = torch.arange(12.0, device=device).reshape(3, 4)
{{
    "plain": base, "transposed": base.t(), "step": base[:, ::2], "fp8": base.to(torch.float8_e4m3fn),
    "csr": torch.eye(3, device=device).to_sparse_csr(), "parameter": torch.nn.Parameter(base.clone()),
    "nested": torch.nested.nested_tensor([base[0], base[1, :2]], layout=torch.jagged), "pinned": {pinned},
}}
"""
SAME = """
import torch
want = torch.arange(12.0).reshape(3, 4)
wanted = {"plain": want, "transposed": want.t(), "step": want[:, ::2], "parameter": want, "pinned": want,
          "fp8": want.to(torch.float8_e4m3fn).float(), "csr": torch.eye(3)}
got = {name: value.detach() for name, value in r[0].items()}
dense = {name: got[name].to_dense() if name == "csr" else got[name].float() for name in wanted}
wrong = [name for name in wanted if got[name].device.type != "cpu" or not torch.equal(dense[name], wanted[name])]
if [each.tolist() for each in got["nested"].unbind()] != [want[0].tolist(), want[1, :2].tolist()]:
    wrong.append("nested")
if not isinstance(r[0]["parameter"], torch.nn.Parameter):
    wrong.append("the class of parameter")
print(wrong)
"""


@step(
    "K14",
    "values of every kind come back right and on the CPU; a small view of a large tensor does not copy all of it",
    limit_s=60,
    without_gpu="cpu",
)
def values(place: Place, find: Findings) -> None:
    one, import_torch = place.ranks(), "import torch\n"
    size = min(10 * GIB, place.memory_bytes // 4, _free_memory() // 6) if place.on_gpu else 200 * MB
    with place.notebook() as book:
        book.values(one, PID)
        with find.going_on("values of each kind"):
            pinned = "base.cpu().pin_memory()" if place.on_gpu else "base.clone()"
            book.ok(f"%%distributed {one} --out r\n{VALUES.format(pinned=pinned)}")
            wrong = book.ok(SAME).stdout.strip()
            find.that("each kind comes back right, on the CPU", wrong == "[]", wrong)
        with find.going_on("a large value"):
            code = f"{import_torch}torch.ones({size // 2}, dtype=torch.bfloat16, device=device)"
            outcome = book.cell(f"%%distributed {one} --out big\n{code}")
            right = book.cell("print(big[0].device.type, big[0][-1].item())").stdout.strip()
            find.that(f"{size / GIB:.1f} GiB come back", right == "cpu 1.0", right or outcome.text[-300:])
            find.within(f"{size / GIB:.1f} GiB", outcome.wall_s, 8.0)
            book.cell("big = None")
        with find.going_on("a view"):
            code = f"{import_torch}torch.ones({2 * size}, dtype=torch.uint8, device=device)[:1 << 20]"
            keep = f"{import_torch}whole = torch.ones({2 * size}, dtype=torch.uint8, device=device)"
            book.ok(f"%%distributed {one} --keep whole\n{keep}")
            outcome = book.cell(f"%%distributed {one} --out small\nwhole[:1 << 20]")
            right = book.cell("print(small[0].numel(), small[0].untyped_storage().nbytes())").stdout.strip()
            find.that("a view of 1 MB travels alone", right == f"{MB} {MB}", right or outcome.text[-300:])
            find.within(f"1 MB of {2 * size / GIB:.1f} GiB", outcome.wall_s, 0.5)
        if place.on_gpu:
            with find.going_on("a captured CUDA tensor"):
                book.ok("import torch\nmine = torch.arange(3, device='cuda')")
                (seen,) = book.values(one, "(str(mine.device) == str(device), mine.tolist())")
                find.that("a CUDA tensor of the notebook is on the rank's device", seen == (True, [0, 1, 2]), seen)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@step(
    "K15",
    "when the kernel is killed its memory is back within 2 s, and only then another notebook gets the GPU",
    limit_s=60,
    without_gpu="bed",
)
def killed_kernel(place: Place, find: Findings) -> None:
    one, before = place.ranks(), place.used_bytes()
    most = int(0.9 * (place.memory_bytes - before)) if place.on_gpu else 60 * GIB
    hold = f"import os, torch\nbig = torch.ones({most}, dtype=torch.uint8, device=device)\nos.getpid()"
    feigned = f"import os\nfrom feigned_cuda import hold\nhold({most})\nbig = 1\nos.getpid()"
    with place.notebook() as first, place.notebook() as second:
        (rank,) = first.values(f"{one} --keep big", hold if place.on_gpu else feigned)
        find.that("it holds the memory", place.used_bytes() - before >= most, f"{place.used_bytes() / GIB:.1f} GiB")
        second.ok("import jupyter_distrib")
        os.kill(first.pid, signal.SIGKILL)
        second.start(f"%%distributed {one} --wait 10\n{hold if place.on_gpu else feigned}")
        gone_s = until(lambda: not is_alive(rank), 10.0, 0.02)
        find.that("the rank is gone within 2 s", gone_s is not None and gone_s <= 2.0, _seconds(gone_s))
        outcome = second.finish(30.0)
        find.that("another notebook gets the GPU and all its memory", outcome.status == "ok", outcome.text[-400:])
        find.figure("the other notebook's cell took", f"{outcome.wall_s:.2f} s")
    with place.notebook() as first, place.notebook() as second:
        first.cell(f"%%distributed {one} --keep big --wait 10\n{hold if place.on_gpu else feigned}")
        os.kill(first.pid, signal.SIGKILL)
        back_s = until(lambda: place.used_bytes() - before < 1 * GIB, 10.0, 0.1)
        find.that("the memory is back within 2 s", back_s is not None and back_s <= 2.0, _seconds(back_s))


def _seconds(took_s: float | None) -> str:
    return "not within 10 s" if took_s is None else f"{took_s:.2f} s"


FAILS = """
import torch
big = torch.ones({size}, dtype=torch.uint8, device=device)
{end}
"""


@step(
    "K24",
    "the memory of a cell that failed is given back while the notebook idles",
    limit_s=45,
    without_gpu=None,
)
def failed_and_idle(place: Place, find: Findings) -> None:
    one = place.ranks()
    size, too_much = place.memory_bytes // 2, 2 * place.memory_bytes
    ends = {
        "raise": "raise ValueError('with all that memory')",
        "out of memory": f"torch.empty({too_much}, dtype=torch.uint8, device=device)",
    }
    with place.notebook() as book:
        book.settled(one)
        before = place.used_bytes()

        def held() -> int:
            return place.used_bytes() - before

        for what, end in ends.items():
            with find.going_on(what):
                failed = book.cell(f"%%distributed {one}\n{FAILS.format(size=size, end=end)}")
                find.that(f"{what}: it is told", failed.status == "error", failed.text[-300:])
                back_s = until(lambda: held() < size // 4, 8.0, 0.1)
                find.that(
                    f"{what}: {size / GIB:.1f} GiB are back within 3 s, without another cell",
                    back_s is not None and back_s <= 3.0,
                    f"{_seconds(back_s)}; {held() / GIB:.2f} GiB held",
                )


@step("K25", "a large value comes back with little more host memory than it has", limit_s=60, without_gpu="cpu")
def host_memory(place: Place, find: Findings) -> None:
    one = place.ranks()
    size = min(10 * GIB, place.memory_bytes // 4, _free_memory() // 6) if place.on_gpu else 200 * MB
    with place.notebook() as book:
        book.settled(one)
        free = [_available()]
        book.start(f"%%distributed {one} --out big\nimport torch\ntorch.ones({size}, dtype=torch.uint8, device=device)")
        began_s = time.monotonic()
        while not (answered := book.client.shell_channel.msg_ready()) and time.monotonic() - began_s < 30:
            free.append(_available())
            time.sleep(0.01)
        outcome = book.finish(20.0)
        find.that(f"{size / GIB:.1f} GiB come back", outcome.status == "ok" and answered, outcome.text[-300:])
        peak = (free[0] - min(free)) / size
        quiet = place.on_gpu  # elsewhere, others use the machine too
        find.that("the host's memory at its peak is at most 1.3 of the value", peak <= 1.3 or not quiet, f"{peak:.2f}")
        find.figure("that took", f"{outcome.wall_s:.2f} s, {size / GIB / outcome.wall_s:.1f} GiB/s")


def _available() -> int:
    """Return what Linux says could be had without swapping."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
