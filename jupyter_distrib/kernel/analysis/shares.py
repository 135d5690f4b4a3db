"""The shares of training time: what each rank spends on data, computation, other ranks, and the rest. Kernel side; pure
functions of a `RunRecord`.

run.shares[3]["waiting"]     0.38
run.shares.sentence          rank 3 waits 38% of its time for rank 7, which is slow in data loading

A rank measures the time of its collectives as a whole. The rank that spends least in them came last, so all of its time
moves data; the time that another rank spends beyond that is waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

PARTS = {
    "data": "data loading",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "moving": "the collectives themselves",
    "waiting": "waiting for other ranks",
    "rest": "code between its steps",
}
"""The parts in display order, worded as in a sentence."""
OWN_PARTS = ("data", "forward", "backward", "optimizer", "rest")
"""Parts in which one rank alone can be slow."""
FEWEST_STEPS, LEAST_S = 5, 2.0
"""Minimum number of steps, and of seconds, for shares to be meaningful."""
LEAST_WAITING, LEAST_DATA = 0.1, 0.3
"""Minimum shares at which the sentence mentions waiting for other ranks, or for data."""


@dataclass(frozen=True, slots=True)
class Shares(Mapping[int, Mapping[str, float]]):
    """The shares of each rank, by rank: part of the time -> share, which add up to 1."""

    seconds: Mapping[int, Mapping[str, float]]
    """Seconds spent on each part, by rank."""
    steps: int
    """Optimizer steps on the rank with the fewest."""

    @classmethod
    def of(cls, record: RunRecord) -> Shares:
        """Return the shares so far; empty until an optimizer has stepped."""
        times = {rank.rank: rank.times for rank in record.ranks.values() if rank.times is not None}
        moving_s = min((each.seconds["collective"] for each in times.values()), default=0.0)
        return cls(
            {rank: _parts(each, moving_s) for rank, each in times.items()},
            min((each.steps for each in times.values()), default=0),
        )

    def __getitem__(self, rank: int) -> Mapping[str, float]:
        if (parts := self.seconds.get(rank)) is None:
            raise KeyError(f"there are no shares of rank {rank}; there are those of: {[*self.seconds] or 'none'}")
        total_s = sum(parts.values()) or 1.0
        return {name: seconds / total_s for name, seconds in parts.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self.seconds)

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def is_meaningful(self) -> bool:
        """Return whether the training has run long enough for its shares to be meaningful."""
        return self.steps >= FEWEST_STEPS and max(sum(parts.values()) for parts in self.seconds.values()) >= LEAST_S

    @property
    def sentence(self) -> str:
        """The sentence worth showing: which ranks wait for which, or how long for data; empty if neither stands out."""
        if not self.is_meaningful:
            return ""
        return self._about_waiting() or self._about_data()

    def mean(self) -> Mapping[str, float]:
        """Return the mean share of each part over the ranks."""
        return {name: _mean(self[rank][name] for rank in self) for name in PARTS}

    def __repr__(self) -> str:
        lines = [f"rank {rank}: {percents(self[rank])}" for rank in self] or ["no optimizer has stepped"]
        return "\n".join([*lines, *filter(None, [self.sentence])])

    def _about_waiting(self) -> str:
        waiting = {rank: self[rank]["waiting"] for rank in self}
        most = max(waiting.values())
        waiters = [rank for rank, share in waiting.items() if share >= most / 2]
        slow = [rank for rank, share in waiting.items() if share <= most / 4]
        if most < LEAST_WAITING or not slow or len(slow) > len(self) / 2:
            return ""
        share = _mean(waiting[rank] for rank in waiters)
        own = "its" if len(waiters) == 1 else "their"
        text = f"{rank_list(waiters)} {_verb('wait', waiters)} {share:.0%} of {own} time for {rank_list(slow)}"
        part = self._slow_part(slow, waiters)
        return f"{text}, which {'is' if len(slow) == 1 else 'are'} slow in {PARTS[part]}" if part else text

    def _slow_part(self, slow: Sequence[int], others: Iterable[int]) -> str:
        """Return the part in which the slow ranks lose most time against the others; empty if no part explains it."""
        of_others = {name: _median(self.seconds[rank][name] for rank in others) for name in PARTS}
        excess = {name: _median(self.seconds[rank][name] for rank in slow) - of_others[name] for name in OWN_PARTS}
        part = max(excess, key=lambda name: excess[name])
        return part if excess[part] >= of_others["waiting"] / 3 else ""

    def _about_data(self) -> str:
        share = self.mean()["data"]
        if share < LEAST_DATA:
            return ""
        own = "its" if len(self) == 1 else "their"
        return f"{rank_list(self)} {_verb('spend', list(self))} {share:.0%} of {own} time on data loading"


def percents(parts: Mapping[str, float]) -> str:
    """Format shares in one line: `data 3% · forward 40% · ...`; parts that round to nothing are left out."""
    return " · ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)


def _parts(times: m.PhaseTimes, moving_s: float) -> dict[str, float]:
    seconds = times.seconds
    found = {
        **{name: seconds[name] for name in ("data", "forward", "backward", "optimizer")},
        "moving": moving_s,
        "waiting": seconds["collective"] - moving_s,
        "rest": seconds["other"],
    }
    return {name: found[name] for name in PARTS}


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found)


def _median(numbers: Iterable[float]) -> float:
    found = sorted(numbers)  # the module `statistics` takes longer to import than a cell to run
    return found[len(found) // 2]


def _verb(verb: str, ranks: Sequence[int]) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
