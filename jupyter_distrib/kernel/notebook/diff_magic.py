"""The line magic `%distributed_diff`, which compares a kept value between ranks. Kernel's main thread."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.session import rank_differences, session
from jupyter_distrib.kernel.session.rank_differences import Differences
from jupyter_distrib.kernel.session.runs.results import RankValue


def answer(line: str, notebook: Mapping[str, object]) -> Differences:
    """Return how the value of a name differs between the ranks that keep it. Raises `DistributedError`."""
    name = line.strip()
    value = notebook.get(name)
    if not isinstance(value, RankValue):
        kept = sorted(name for name, each in notebook.items() if isinstance(each, RankValue))
        known = f"names that ranks keep: {', '.join(kept)}" if kept else "no rank keeps a value: use --keep NAME"
        raise OptionsError(f"%distributed_diff wants the name of a value that --keep has kept on the ranks; {known}")
    return rank_differences.compare(session.current(), value)
