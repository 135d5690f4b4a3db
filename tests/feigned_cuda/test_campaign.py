"""Random cells and faults on feigned GPUs: whatever happens to a training, the next one runs.

    python -m tests.feigned_cuda.test_campaign [MINUTES] [SEED]

After each step a training on as many ranks ends well and in time, each rank has one context, and a while later the GPUs
hold hardly any memory. The seed repeats the steps, if not their timing.
"""

from __future__ import annotations

import random
import sys
import time

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook, Outcome
from tests.processes import wait_until

SECONDS = 40.0
NEXT_S = 40.0
HELD_MB = 1024
OWN_GROUPS = """
import torch, torch.distributed as dist
dist.init_process_group("nccl"{bound})
t = torch.ones(1 << 10, device=device)
group = dist.new_group([0])
dist.all_reduce(t)
print("steps", flush=True)
try:
    for number in {steps}:
        dist.all_reduce(t * 1)
        {then}
finally:
    if {destroys}: dist.destroy_process_group()
"""
FAULTS = {
    "raises": "if number == 20 and rank == 1: raise ValueError('of rank 1')",
    "all raise": "if number == 20: raise ValueError('of all')",
    "is full": "if number == 20 and rank == 1: torch.empty(3 << 30, device=device)",
    "all are full": "if number == 20: torch.empty(3 << 30, device=device)",
    "breaks": "if number == 20 and rank == 1: __import__('os').environ['FEIGNED_CUDA_BREAK'] = 'Functor'",
    "exits": "if number == 20 and rank == 1: __import__('os')._exit(3)",
    "spins": "if number == 20 and rank == 1: torch.cuda._sleep(1 << 50)",
    "nothing": "pass",
}
STOPPED = ("nothing", "spins")
"""Faults after which only Stop ends the cell."""


class Campaign:
    """One notebook, and the steps that it takes."""

    def __init__(self, machine: FeignedCuda, book: Notebook, seed: int) -> None:
        self._machine, self._book, self._random, self.steps = machine, book, random.Random(seed), 0
        for strategy in ("fsdp", "ddp"):  # what a training needs is loaded before the times count
            book.cell(self._cell(4, strategy, "pass", "range(5)"), 120)

    def run(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.step()

    def step(self) -> None:
        """Take a step, and raise an AssertionError with its story if what must hold does not."""
        choose, self.steps = self._random.choice, self.steps + 1
        size, fault, strategy = choose([2, 2, 3, 4]), choose(sorted(FAULTS)), choose(["ddp", "fsdp", "own"])
        stop_s = self._random.uniform(0, 0.4) if fault in STOPPED else None
        began_s = time.monotonic()
        outcome = self._faulty(self._cell(size, strategy, FAULTS[fault]), stop_s)
        story = f"step {self.steps}: {size} ranks, {strategy}, {fault}, stop after {stop_s}: {outcome.text}"
        assert outcome.status == "error", story
        assert time.monotonic() - began_s < NEXT_S, story
        after = self._book.cell(self._cell(size, choose(["ddp", "fsdp"]), "pass", "range(5)"), NEXT_S + 10)
        assert after.status == "ok", f"{story}\n\nnext: {after.text}"
        assert after.wall_s < NEXT_S, f"{story}\n\nnext: {after.wall_s} s"
        assert all(len(gpus) <= 1 for gpus in self._machine.contexts().values()), story
        held = [self._machine.held_mb(gpu) for gpu in range(8)]
        assert wait_until(lambda: all(self._machine.held_mb(gpu) < HELD_MB for gpu in range(8)), 4), f"{held}\n{story}"

    def _cell(self, size: int, strategy: str, then: str, steps: str = "range(10**9)") -> str:
        if strategy == "own":
            bound, destroys = self._random.choice(["", ", device_id=device"]), self._random.random() < 0.5
            return f"%%distributed --gpus {size}\n" + OWN_GROUPS.format(
                bound=bound, steps=steps, then=then, destroys=destroys
            )
        return trainings.cell(f"--strategy {strategy}", steps, then).replace("--gpus 2", f"--gpus {size}")

    def _faulty(self, code: str, stop_s: float | None) -> Outcome:
        self._book.start(code)
        if stop_s is not None and self._book.shows("steps", NEXT_S):
            at_s = time.monotonic() + stop_s
            wait_until(lambda: time.monotonic() > at_s, 1)
            self._book.interrupt()
        try:
            return self._book.finish(NEXT_S)
        except AssertionError as error:
            raise AssertionError(f"{code}\n{error}") from None


def test_some_steps(machine: FeignedCuda, book: Notebook) -> None:
    seed = random.randrange(10_000)
    campaign = Campaign(machine, book, seed)
    try:
        campaign.run(SECONDS)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {error}") from None
    assert campaign.steps > 1


def main(minutes: float = 10.0, seed: int = 0) -> None:
    with FeignedCuda(gpus=8) as machine, machine.notebook() as book:
        campaign = Campaign(machine, book, seed)
        campaign.run(60 * minutes)
        print(f"{campaign.steps} steps, seed {seed}")


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((float, int), sys.argv[1:], strict=False)))
