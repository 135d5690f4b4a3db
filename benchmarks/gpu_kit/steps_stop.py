"""Stop, exceptions and stalls of ranks that meet through nccl (two on one GPU, or one on each), or gloo on the CPU."""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_kit.place import NO_NCCL, NO_NCCL_KNOWN, PID, Backend, Book, Place, resident_bytes
from benchmarks.gpu_kit.step import Findings, Skipped, step, until

STACKS = re.compile(r"frame #\d+|Exception raised from|TCPStore|libtorch|terminate called|\[PG ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks that a step has."""

    place: Place
    count: int = 2
    twice: Backend | None = "nccl"
    """Two of them on one GPU; None: each has its own."""

    @property
    def options(self) -> str:
        return f"{self.place.ranks(self.count)} --strategy ddp"

    def environment(self) -> dict[str, object]:
        return {"twice": self.twice, "all_gpus": self.twice is None}

    def check_nccl(self, book: Book) -> None:
        """Leave the step out if NCCL does not serve two ranks on one GPU here."""
        feigned = self.twice == "nccl" and self.place.on_gpu
        if feigned and (known := os.environ.get(NO_NCCL_KNOWN)):
            raise Skipped(known)
        book.start(f"%%distributed {self.options}\n{MEET}")
        try:
            outcome = book.finish(20.0 if feigned else 40.0)
        except AssertionError:
            book.interrupt()
            outcome = book.finish(20.0)
        if outcome.status != "ok":
            told = outcome.text[-600:]
            raise Skipped(f"{NO_NCCL}: {told}") if feigned else AssertionError(told)


MEET = """
import torch
t = torch.ones(1, device=device)
torch.distributed.all_reduce(t)
t.item()
"""
LOOPS = """
import torch
t = torch.ones(1, device=device)
{flag}
while True:
    torch.distributed.all_reduce(t)
    t.fill_(1.0).item()
"""
MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(10)))
optimizer = torch.optim.AdamW(model.parameters())
"""
STEPS_OF = """
x = torch.randn(16, 32, device=next(model.parameters()).device)
for number in {numbers}:
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 3:
        {flag}
    {more}
"""
TRAINS = f"{MODEL}{STEPS_OF.format(numbers='range(5)', flag='pass', more='pass')}"


def until_all(flags: list[Path]) -> None:
    """Wait until all ranks have come to the line with the flag."""
    assert until(lambda: all(flag.exists() for flag in flags), 20.0, 0.01) is not None, "the ranks do not begin"


def endless(place: Place, flag: str, more: str = "pass") -> str:
    """Return training without a sync, which never ends."""
    return STEPS_OF.format(numbers="__import__('itertools').count()", flag=place.flag_line(flag), more=more)


@step(
    "K8a",
    "Stop in a loop of collectives: the same ranks, kept values, and the next collective",
    limit_s=60,
    without_gpu="cpu",
)
def stop_in_collective(place: Place, find: Findings) -> None:
    check_collective(Group(place=place), find)


def check_collective(group: Group, find: Findings) -> None:
    place = group.place
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        pids = book.settled(group.options)
        book.ok(f"%%distributed {group.options} --keep w\nimport torch\nw = torch.full((3,), 2.0, device=device)")
        flags = place.flags("loops", group.count)
        code = f"%%distributed {group.options}\n{LOOPS.format(flag=place.flag_line('loops'))}"
        took_s, outcome = book.stopped(code, flags, 0.5)
        find.that("Stop is a KeyboardInterrupt", outcome.ename == "KeyboardInterrupt", outcome.text[-300:])
        find.within("Stop", took_s, 2.0)
        after = book.cell(f"%%distributed {group.options} --out after\n{MEET}")
        met = book.cell("print(list(after))").stdout.strip()
        find.that("the next collective meets", met == str([float(group.count)] * group.count), met or after.text[-300:])
        find.within("the next cell", after.wall_s, 6.0)
        now = book.values(group.options, PID)
        find.that("on the same ranks", now == pids, f"{pids}, {now}")
        kept = book.cell(f"%%distributed {group.options} --out sums\nw.sum().item()")
        find.that("with what was kept", kept.status == "ok", kept.text[-200:])


@step(
    "K8b",
    "Stop in training that runs ahead of the GPU, again and again: each next cell trains",
    limit_s=80,
    without_gpu="cpu",
)
def stop_in_training(place: Place, find: Findings) -> None:
    check_training(Group(place=place), find, rounds=6 if place.on_gpu else 3)


def check_training(group: Group, find: Findings, rounds: int) -> None:
    place, draw = group.place, random.Random(0)
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        pids, same = book.settled(group.options), 0
        flags = place.flags("trains", group.count)
        for number in range(1, rounds + 1):
            code = f"%%distributed {group.options}\n{MODEL}{endless(place, 'trains')}"
            took_s, outcome = book.stopped(code, flags, draw.uniform(0.0, 0.6))
            find.that(f"stop {number}", outcome.ename == "KeyboardInterrupt", f"{took_s:.2f} s {outcome.evalue[:100]}")
            check_trains(book, group, find, f"after stop {number}")
            now = book.values(group.options, PID)
            same, pids = same + (now == pids), now
        find.that(f"the ranks stay, all but twice of {rounds}", same >= rounds - 2, f"{same} of {rounds}")


def check_trains(book: Book, group: Group, find: Findings, when: str) -> None:
    book.start(f"%%distributed {group.options}\n{TRAINS}")
    try:
        after = book.finish(10.0)
    except AssertionError as hangs:
        find.that(f"{when} the next cell trains within 6 s", False, f"it hangs: {str(hangs)[-200:]}")
        book.interrupt()
        book.finish(20.0)
        return
    good = after.status == "ok" and after.wall_s <= 6.0
    find.that(f"{when} the next cell trains within 6 s", good, f"{after.wall_s:.2f} s {after.evalue[:200]}")


@step("K8c", "one rank raises in training: told at once, and the next cell trains", limit_s=45, without_gpu="cpu")
def raises_in_training(place: Place, find: Findings) -> None:
    check_raises(Group(place=place), find)


def check_raises(group: Group, find: Findings) -> None:
    place = group.place
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        book.settled(group.options)
        raising = "if number == 50 and rank == 1: raise ValueError('of rank 1')"
        flags = place.flags("raises", group.count)
        book.start(f"%%distributed {group.options}\n{MODEL}{endless(place, 'raises', raising)}")
        until_all(flags)
        began_s = time.monotonic()
        failed = book.finish(20.0)
        took_s = time.monotonic() - began_s
        find.that("the cause is rank 1's ValueError", failed.ename == "ValueError", failed.text[-400:])
        find.that("rank 1 is named", "rank 1" in failed.text.lower(), failed.text[-200:])
        find.within("the cell ends", took_s, 4.0)
        check_trains(book, group, find, "after it")


@step(
    "K8d", "a rank that waits alone in a collective is told with the line; Stop ends it", limit_s=45, without_gpu="cpu"
)
def stall(place: Place, find: Findings) -> None:
    check_stall(Group(place=place), find)


def check_stall(group: Group, find: Findings) -> None:
    place = group.place
    waits = "; torch.cuda.synchronize()" if place.on_gpu else ""
    code = f"import torch\nt = torch.ones(1, device=device)\nif rank == 0:\n    torch.distributed.all_reduce(t){waits}"
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        book.settled(group.options)
        before = place.used_bytes() if place.on_gpu else 0
        began_s = time.monotonic()
        book.start(f"%%distributed {group.options}\n{code}")
        try:
            told = book.until("all_reduce #1", 12.0).text
            find.within("the stall is told", time.monotonic() - began_s, 8.0)
            find.that("with the line", "line 5" in told, told[-300:])
        except AssertionError as missing:
            find.that("the stall is told", False, str(missing)[-300:])
        if place.on_gpu:
            grown = (place.used_bytes() - before) / 2**20
            find.that("looking at it makes no second context", grown < 300, f"{grown:.0f} MB more on the first GPU")
        began_s = time.monotonic()
        book.interrupt()
        outcome = book.finish(15.0)
        find.within("Stop", time.monotonic() - began_s, 3.0)
        find.that("Stop ends it", outcome.ename == "KeyboardInterrupt", outcome.text[-300:])
        check_trains(book, group, find, "after it")


@step("K8f", "an error of all ranks at the same step: the group stays, and what is kept", limit_s=45, without_gpu="cpu")
def same_error(place: Place, find: Findings) -> None:
    check_same_error(Group(place=place), find)


def check_same_error(group: Group, find: Findings) -> None:
    place = group.place
    head = f"%%distributed {group.options}"
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        pids = book.settled(group.options)
        book.ok(f"{head} --keep model,optimizer\n{TRAINS}\nimport sys\nsys.kit_group = torch.distributed.group.WORLD")
        ends = "if number == 20: raise ValueError('of all ranks')"
        loop = STEPS_OF.format(numbers="range(50)", flag="pass", more=ends)
        failed = book.cell(f"{head}\nimport torch\n{loop}", 20.0)
        find.that("the error is told", failed.ename == "ValueError", failed.text[-300:])
        trained = book.cell(
            f"{head}\nimport torch\n{STEPS_OF.format(numbers='range(5)', flag='pass', more='pass')}", 20.0
        )
        find.that("what is kept trains on", trained.status == "ok", trained.text[-300:])
        find.within("the next cell", trained.wall_s, 1.0 if place.on_gpu else 6.0)
        same = book.values(group.options, "import sys, torch\nsys.kit_group is torch.distributed.group.WORLD")
        if place.on_gpu:  # groups of gloo are made anew in milliseconds
            find.that("the group stays", all(same), same)
        find.that("on the same ranks", book.values(group.options, PID) == pids)
        states = book.values(group.options, SAME_WEIGHTS)
        find.that("with the same weights", all(finite and apart == 0.0 for finite, apart in states), states)
        noted = [line for line in (failed.text + trained.text).splitlines() if "middle of a step" in line]
        find.that("no value is called torn", not noted, noted[:1])


@step("K8e", "rounds of Stop leave no memory, threads, or C++ stacks behind", limit_s=60, without_gpu="cpu")
def leftovers(place: Place, find: Findings) -> None:
    group = Group(place=place)
    with place.notebook(twice="nccl") as book:
        group.check_nccl(book)
        flags, seen, texts = place.flags("again", 2), [], []
        for number in range(4):
            pids = book.settled(group.options) if number == 0 else book.values(group.options, PID)
            held = [resident_bytes(pid) / 2**20 for pid in pids]
            threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in pids]
            seen.append((max(held), max(threads), place.used_bytes() / 2**20 if place.on_gpu else 0.0))
            if number < 3:
                code = f"%%distributed {group.options}\n{MODEL}{endless(place, 'again')}"
                texts.append(book.stopped(code, flags, 0.2)[1].text)
                texts.append(book.cell(f"%%distributed {group.options}\n{TRAINS}").text)
        first, last = seen[1], seen[-1]  # the first round makes what stays, such as buffers
        find.that("less than 60 MB more for each round", last[0] - first[0] < 120, f"{last[0] - first[0]:.0f} MB in 2")
        find.that("less than 2 threads more for each round", last[1] - first[1] < 4, f"{last[1] - first[1]} in 2")
        find.that(
            "less than 60 MB more of the GPU for each round", last[2] - first[2] < 120, f"{last[2] - first[2]:.0f} MB"
        )
        shown = STACKS.findall("\n".join(texts))
        find.that("no stacks of C++ below the cells", not shown, shown[:3])
        logged = [line for path in (place.folder / "logs").rglob("*") if path.is_file() for line in _stacks(path)]
        find.that("nor in the logs", not logged, logged[:2])


def _stacks(path: Path) -> list[str]:
    return [line[:200] for line in path.read_text(errors="replace").splitlines() if STACKS.search(line)]


SAME_WEIGHTS = """
import torch, torch.distributed as dist
flat = torch.cat([p.detach().float().flatten() for p in model.parameters()])
finite = bool(torch.isfinite(flat).all())
least, most = flat.clone(), flat.clone()
dist.all_reduce(least, dist.ReduceOp.MIN)
dist.all_reduce(most, dist.ReduceOp.MAX)
(finite, (most - least).abs().max().item())
"""


@step(
    "K9",
    "kept weights after Stop in training: finite, the same on all ranks, and it is said if a step was cut",
    limit_s=60,
    without_gpu="cpu",
)
def kept_weights(place: Place, find: Findings) -> None:
    check_kept(Group(place=place), find)


def check_kept(group: Group, find: Findings) -> None:
    place, draw = group.place, random.Random(1)
    keep = f"{group.options} --keep model,optimizer"
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        book.settled(group.options)
        flags = place.flags("kept", group.count)
        book.ok(f"%%distributed {keep}\n{TRAINS}")
        for number in range(1, 4):
            code = f"%%distributed {keep}\nimport torch\n{endless(place, 'kept')}"
            _, outcome = book.stopped(code, flags, draw.uniform(0.0, 0.5))
            # What is kept is rank 0's again once the ranks train together.
            five = STEPS_OF.format(numbers="range(5)", flag="pass", more="pass")
            trained = book.cell(f"%%distributed {keep}\nimport torch\n{five}", 20.0)
            find.that(f"stop {number}: training goes on", trained.status == "ok", trained.text[-300:])
            states = book.values(group.options, SAME_WEIGHTS)
            find.that(f"stop {number}: all weights are finite", all(finite for finite, _ in states), states)
            find.that(f"stop {number}: the ranks have the same", all(apart == 0.0 for _, apart in states), states)
            noted = [line for line in (outcome.text + trained.text).splitlines() if "step" in line]
            find.figure(f"stop {number}: it was said", "; ".join(noted)[:200] or "nothing")


WAITS = """
import datetime, torch
torch.distributed.init_process_group({backend!r}, timeout=datetime.timedelta(seconds=4))
t = torch.ones(1, device=device)
if rank == 0: breakpoint()
torch.distributed.all_reduce(t)
t.item()
"""


@step(
    "K20", "a rank at a breakpoint keeps the others waiting, whatever the group's limit", limit_s=50, without_gpu="cpu"
)
def breakpoint_in_rank(place: Place, find: Findings) -> None:
    group = Group(place=place)
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        options = place.ranks(group.count)
        pids = book.settled(options)
        backend = "cpu:gloo,cuda:nccl" if place.on_gpu else "gloo"
        book.start(f"%%distributed {options} --out met\n{WAITS.format(backend=backend)}", keyboard=True)
        book.asked("rank 0 (Pdb)", 20.0)
        time.sleep(7.0)  # torch's own limit is 4 s
        book.client.input("c")
        outcome = book.finish(15.0)
        met = book.cell("print(list(met))").stdout.strip()
        find.that("the others have waited", met == "[2.0, 2.0]", met or outcome.text[-400:])
        find.that("the ranks are the same", book.values(options, PID) == pids)


NEVER_ENDS = """
import torch
{flag}
{wait}
"""


@step(
    "K23",
    "Stop in a kernel that never ends: the rank is replaced, and its memory given back",
    limit_s=45,
    without_gpu="cpu",
)
def endless_kernel(place: Place, find: Findings) -> None:
    one = place.ranks()
    # Without a GPU: C code in which Python looks for no signal.
    wait = "torch.cuda._sleep(1 << 42)\ntorch.ones(1, device=device).item()" if place.on_gpu else "sum(iter(int, 1))"
    with place.notebook() as book:
        (pid,) = book.settled(one)
        before = place.used_bytes() if place.on_gpu else 0
        flags = place.flags("never", 1)
        code = NEVER_ENDS.format(flag=place.flag_line("never"), wait=wait)
        took_s, outcome = book.stopped(f"%%distributed {one}\n{code}", flags, 0.5)
        find.that("Stop ends the cell", outcome.status == "error", outcome.text[-300:])
        find.within("Stop", took_s, 5.0)
        after = book.cell(f"%%distributed {one} --out after\n{MEET_ALONE}")
        find.that("the next cell runs", after.status == "ok", after.text[-300:])
        find.within("the next cell", after.wall_s, 6.0)
        (other,) = book.values(one, PID)
        find.that("in another process", other != pid, f"{pid}, {other}")
        if place.on_gpu:
            back_s = until(lambda: place.used_bytes() - before < 1 << 28, 10.0, 0.05)
            find.that(
                "no memory of the old rank is left", back_s is not None, "not within 10 s" if back_s is None else ""
            )


MEET_ALONE = "import torch\ntorch.ones(1, device=device).item()"


DESTROYS = """
import torch
torch.distributed.init_process_group({backend!r})
t = torch.ones(1 << 20, device=device)
try:
    for number in __import__('itertools').count():
        torch.distributed.all_reduce(t)
        if number % 10 == 0: t[0].item()  # as a training looks at its loss; NCCL aborts a queue of 1024 kernels slowly
        if number == 20:
            {flag}
            {at_20}
finally:
    torch.distributed.destroy_process_group()
"""


@step(
    "K31",
    "a script that destroys its group in the end is stopped, and told of a failure, as fast as any",
    limit_s=60,
    without_gpu="cpu",
)
def destroys(place: Place, find: Findings) -> None:
    group = Group(place=place)
    options = place.ranks(group.count)
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        pids = book.settled(options)
        book.ok(f"%%distributed {options} --keep w\nw = rank")
        for what, at_20 in (
            ("one raises", "if rank == 1: raise ValueError('of rank 1')"),
            ("one waits alone", "if rank == 1: __import__('signal').pause()"),
            ("all run", "pass"),
        ):
            with find.going_on(what):
                code = DESTROYS.format(backend=place.backend, flag=place.flag_line("destroys"), at_20=at_20)
                flags = place.flags("destroys", group.count)
                for flag in flags:
                    flag.unlink(missing_ok=True)
                book.start(f"%%distributed {options}\n{code}")
                until_all(flags)
                time.sleep(0.3)
                began_s = time.monotonic()
                if what != "one raises":
                    book.interrupt()
                outcome = book.finish(20.0)
                find.within(f"{what}: the cell ends", time.monotonic() - began_s, 2.0)
                name = "ValueError" if what == "one raises" else "KeyboardInterrupt"
                find.that(f"{what}: with the cause", outcome.ename == name, outcome.text[-300:])
                now = book.values(options, PID)
                find.that(f"{what}: the ranks stay", now == pids, f"{pids}, {now}")
        kept = book.cell(f"%%distributed {options} --out kept\nw")
        find.that("with what was kept", kept.status == "ok", kept.text[-300:])
        check_trains(book, group, find, "after it")
