"""The line magic `%distributed_runs`, which lists, searches and compares saved runs. Kernel's main thread."""

from __future__ import annotations

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.history import run_files
from jupyter_distrib.kernel.history.listing import Comparison, RunList, matching
from jupyter_distrib.kernel.session import lost_runs, session
from jupyter_distrib.options import split_words


def answer(line: str) -> RunList | Comparison:
    """Return the runs that a line asks for: `lr ddp`, `12`, `diff 12 15`. Raises `DistributedError`."""
    current = session.current()
    current.history_writer.flush()
    lost_runs.save(current.settings)
    words = split_words(line)
    first, names = "".join(words[:1]), words[1:]
    if first == "diff":
        if len(names) < 2:
            raise OptionsError("%distributed_runs diff wants two or more runs: %distributed_runs diff 12 15")
        return Comparison(tuple(run_files.find(name) for name in names))
    if first.isdecimal() and not names:
        return Comparison((run_files.find(first),))
    found = run_files.look()
    return matching(found.runs, words, found.note)
