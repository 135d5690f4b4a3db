"""A step of the kit and what it finds, check by check. Pure, except that each check is written down at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.gpu_kit.place import Place

Where = Literal["gpu", "bed", "cpu"]
"""Where a step runs: on real GPUs, on feigned ones, or on CPU ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold, or a figure of which nothing is asked."""

    what: str
    ok: bool | None
    """None: a figure."""
    measured: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A few cells, and what must hold of them."""

    name: str
    title: str
    """What must hold, in a few words."""
    limit_s: float
    without_gpu: Where | None
    """Where it runs on a machine without a GPU; None if nothing of it makes sense there."""
    gpus: int
    """Real GPUs that it needs."""
    run: Callable[[Place, Findings], None]


class Skipped(Exception):
    """The step has nothing to say on this machine, for the reason given."""


class Findings:
    """What a step has found so far. Each check is a line of a file at once: those of a step that is killed stay."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def that(self, what: str, ok: bool, measured: object = "") -> bool:
        """Write down whether something holds."""
        self._write(Check(what=what, ok=bool(ok), measured=str(measured)))
        return bool(ok)

    def figure(self, what: str, measured: object) -> None:
        """Write down a figure."""
        self._write(Check(what=what, ok=None, measured=str(measured)))

    def within(self, what: str, took_s: float, limit_s: float) -> bool:
        """Write down whether something took no longer than it may."""
        return self.that(f"{what} within {limit_s:g} s", took_s <= limit_s, f"{took_s:.2f} s")

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Write an error of this part down as a failed check, and go on with the next part."""
        try:
            yield
        except Skipped as skipped:
            self.figure(what, f"left out: {skipped}")
        except Exception as error:
            self.that(what, False, f"{type(error).__name__}: {error}"[-600:])

    def _write(self, check: Check) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(check)) + "\n")


def read(path: Path) -> list[Check]:
    """Return what was written down, also by a step that was killed in the middle of a line."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Check(**json.loads(line)))
        except ValueError:
            continue
    return found


STEPS: dict[str, Step] = {}
"""All steps by name, in the order in which they were declared."""


def step(
    name: str, title: str, *, limit_s: float, without_gpu: Where | None, gpus: int = 1
) -> Callable[[Callable[[Place, Findings], None]], Callable[[Place, Findings], None]]:
    """Declare a step."""

    def declare(run: Callable[[Place, Findings], None]) -> Callable[[Place, Findings], None]:
        STEPS[name] = Step(name=name, title=title, limit_s=limit_s, without_gpu=without_gpu, gpus=gpus, run=run)
        return run

    return declare


def until(condition: Callable[[], object], limit_s: float, every_s: float = 0.05) -> float | None:
    """Wait for something that nothing tells of; return after how long it came, or None."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > limit_s:
            return None
        time.sleep(every_s)
    return time.monotonic() - began_s
