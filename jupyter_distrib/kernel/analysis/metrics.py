"""The numbers that the ranks of a run have reported, as a table for the user. Kernel side; a copy of the record's.

run.metrics["loss"]        {0: [(0, 0.9), (1, 0.7)], 1: [(0, 0.8), (1, 0.6)]}    rank -> (step, value)
run.metrics.to_pandas()    a row for each report: rank, step, seconds, loss, accuracy
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.analysis.rank_mean import means
from jupyter_distrib.kernel.record.record import RunRecord

if TYPE_CHECKING:
    import pandas as pd

OWN_COLUMNS = ("rank", "step", "seconds")
Row = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Metrics(Sequence[Row]):
    """The reported numbers of one run: a sequence of rows, one for each report that the record keeps.

    A row has `rank`, `step`, `seconds` since the first rank began, and each metric by its name; None for a
    metric that this report did not have. The record keeps up to 1,000 reports of a rank, evenly spaced over the run;
    reports of steps that a restart has repeated are left out.
    """

    names: tuple[str, ...]
    """The names of the metrics, in the order in which they were first reported."""
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, record: RunRecord) -> Metrics:
        """Return the numbers reported so far; call it under the run's lock."""
        ranks = record.ranks.values()
        names = tuple(dict.fromkeys(name for rank in ranks for name in rank.metrics))
        began_s = record.began_at_s or 0.0
        empty = dict.fromkeys(names)
        return cls(
            names,
            tuple(
                {"rank": rank.rank, "step": sample.step, "seconds": sample.at_s - began_s, **empty, **sample.values}
                for rank in ranks
                for sample in rank.history
                if not sample.lost
            ),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, key: Any) -> Any:
        """Return the points `(step, value)` of a metric by rank; for a number or a slice, rows."""
        if not isinstance(key, str):
            return self.rows[key]
        if key not in self.names:
            raise KeyError(f"no rank has reported {key!r}; reported: {', '.join(self.names) or 'nothing'}")
        points: dict[int, list[tuple[int, float]]] = {}
        for row in self.rows:
            if row[key] is not None:
                points.setdefault(int(row["rank"] or 0), []).append((int(row["step"] or 0), float(row[key] or 0.0)))
        return points

    def mean(self, name: str) -> list[tuple[float, float]]:
        """Return the points `(step, value)` of the mean over the ranks, at the steps that nearly all of them have
        reached, as the charts of many ranks show it."""
        return [(each.step, each.mean) for each in means(self.finite(name))]

    def finite(self, name: str) -> dict[int, list[tuple[int, float]]]:
        """Return the points `(step, value)` of a metric by rank, without nan and inf."""
        of_ranks: dict[int, list[tuple[int, float]]] = self[name]
        return {rank: [point for point in points if isfinite(point[1])] for rank, points in of_ranks.items()}

    def to_pandas(self) -> pd.DataFrame:
        """Return a `pandas.DataFrame` with a row for each report.

        Raises:
            DistributedError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise DistributedError("to_pandas() needs pandas: pip install pandas, or use to_csv(path).") from None
        return pd.DataFrame(list(self.rows), columns=[*OWN_COLUMNS, *self.names])

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row for each report to a CSV file, with the columns described above."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*OWN_COLUMNS, *self.names])
            writer.writeheader()
            writer.writerows(self.rows)

    def __repr__(self) -> str:
        ranks = len({row["rank"] for row in self.rows})
        names = ", ".join(self.names) or "nothing reported"
        return f"Metrics({names}; {len(self.rows)} reports of {ranks} rank{'s' * (ranks != 1)})"
