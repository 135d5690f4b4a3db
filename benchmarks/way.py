"""Count how much of the package a warm cell goes through in the kernel: functions, files, and returns to a file that
it had left already, until the cell is sent; and the calls that other threads make for it afterwards.

python benchmarks/way.py [--package FOLDER] [--visits]      the counts
python benchmarks/way.py --cpu OTHER [--package FOLDER]     the kernel's processor time beside that of another state

A profile function counts Python calls, list comprehensions and resumed generators included, in every thread that the
package starts. Counts do not depend on what else the machine does, except that a thread may find more or less news
when it looks: they are medians over some cells.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from driver import ROOT, Notebook
from plan import Plan

CELL = "%%distributed --ranks 2\nx + rank"
CELLS = 7
SETTLED_S = 1.5
"""Seconds after which nothing is done for a cell any more: the history waits 0.3 s for further runs."""
ALL_SAVED_S = 2.5
"""Seconds after which the last of many quick runs is saved."""
TRACER = """\
import sys, threading
_calls, _on = [], [False]
def _profile(frame, event, argument, root={root!r}):
    if event == "call" and _on[0] and frame.f_code.co_filename.startswith(root):
        code = frame.f_code
        _calls.append((threading.get_ident(), code.co_filename[len(root):], code.co_qualname, code.co_firstlineno))
threading.setprofile(_profile)
sys.setprofile(_profile)
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the package."""

    thread: int
    file: str
    function: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The calls for one cell, by the part of its way."""

    before_sending: Sequence[Call]
    """Those of the cell's thread until the cell is sent."""
    until_value: Sequence[Call]
    """Those of the cell's thread from then until the value is returned."""
    beside: Sequence[Call]
    """Those of other threads until the value is returned: the pool's events."""
    behind: Sequence[Call]
    """Those of all threads after the value is returned: the history, the sidebar."""

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Way:
        begin = next(place for place, call in enumerate(calls) if call.function == "CellMagics.distributed")
        thread = calls[begin].thread
        sent = next(place for place, call in enumerate(calls) if call.function == "Run.sent")
        end = max(place for place, call in enumerate(calls) if call.function == "Run._conclude")
        while end + 1 < len(calls) and not calls[end].function.startswith("Cells.ended"):
            end += 1
        return cls(
            before_sending=[call for call in calls[begin:sent] if call.thread == thread],
            until_value=[call for call in calls[sent:end] if call.thread == thread],
            beside=[call for call in calls[begin:end] if call.thread != thread],
            behind=calls[end:],
        )

    @property
    def all(self) -> Sequence[Call]:
        return [*self.before_sending, *self.until_value, *self.beside, *self.behind]


def stays(calls: Sequence[Call]) -> int:
    """Return the number of times that a file is entered from another one."""
    return bool(calls) + sum(one.file != other.file for one, other in pairwise(calls))


def files(calls: Sequence[Call]) -> int:
    return len({call.file for call in calls})


def row(calls: Sequence[Call]) -> tuple[int, int, int, int]:
    """Return the numbers of calls, functions, files, and returns to a file already left."""
    return len(calls), len(set(calls)), files(calls), stays(calls) - files(calls)


@contextmanager
def full_history() -> Iterator[dict[str, str]]:
    """Give the environment of a kernel whose history holds as many saved runs as it keeps."""
    with tempfile.TemporaryDirectory(prefix="jdb-") as state:
        history = Path(state) / "jupyter_distrib" / "history"
        history.mkdir(parents=True)
        for number in range(1, 501):
            (history / f"{number:08}_a1b2c3-{number}.json").write_text("{}\n")
        yield {"XDG_STATE_HOME": state, "JUPYTER_DISTRIB_LOG_DIR": ""}  # few users set it, and a cell checks it


def record(package: Path, cells: int) -> list[Way]:
    """Return the ways of some cells, each in a kernel that has had time to settle."""
    ways = []
    with full_history() as env, Plan(package=package).notebook(env=env) as notebook:
        (notebook.folder / ".git").mkdir()  # settings are searched for up to the top of a repository, not in /tmp
        notebook.good(TRACER.format(root=f"{package}/jupyter_distrib/"))
        notebook.good("%load_ext jupyter_distrib\nx = 1")
        for _ in range(5):
            notebook.good(CELL)
        for _ in range(cells):
            notebook.good("_calls.clear()\n_on[0] = True")
            time.sleep(SETTLED_S)
            notebook.good(CELL)
            time.sleep(SETTLED_S)
            rows = notebook.value("[_on.__setitem__(0, False), list(_calls)][1]")
            ways.append(Way.of(_since_cell([Call(*each) for each in rows])))
    return ways


def _since_cell(calls: Sequence[Call]) -> Sequence[Call]:
    """Leave out what belongs to the cells of this script before and after the measured one."""
    magic = next(place for place, call in enumerate(calls) if call.function == "CellMagics.distributed")
    after = [place for place, call in enumerate(calls) if place > magic and call.file.endswith("comment_syntax.py")]
    after = [place for place in after if calls[place].function == "transform"]
    return calls[magic : after[0] if after else None]


PARTS = {
    "before_sending": "cell's thread, until the cell is sent",
    "until_value": "cell's thread, from then until the value is returned",
    "beside": "other threads until then",
    "behind": "all threads, after the value is returned",
    "all": "all",
}


def show_counts(package: Path, visits: bool) -> None:
    ways = record(package, CELLS)
    print(f"{'warm `x + rank`, 2 ranks, in the kernel':56} {'calls':>6} {'functions':>10} {'files':>6} {'returns':>8}")
    for part, name in PARTS.items():
        counts = [row(getattr(way, part)) for way in ways]
        calls, functions, in_files, returns = (round(statistics.median(each)) for each in zip(*counts, strict=True))
        print(f"{name:56} {calls:6} {functions:10} {in_files:6} {returns:8}")
    way = sorted(ways, key=lambda each: len(each.behind))[len(ways) // 2]
    print("\nafter the value is returned, calls by file:")
    for file, count in Counter(call.file for call in way.behind).most_common():
        print(f"  {count:5} {file}")
    if visits:
        for part in ("before_sending", "until_value", "beside", "behind"):
            print(f"\n{PARTS[part]}:")
            last: tuple[int, str] | None = None
            for call in getattr(way, part):
                if (call.thread, call.file) != last:
                    last = call.thread, call.file
                    print(f"{call.file}")
                print(f"    {call.function}")


def show_cpu(package: Path, other: Path, rounds: int = 8) -> None:
    """Print the kernel's processor time for a warm no-op in two states of the package, which take turns.

    Each round has new kernels: two kernels of the same code differ more than the rounds of one.
    """
    kinds = {"quick succession": (40, 0.0), "one at a time": (8, 0.6)}
    cell, plain = "%%distributed --ranks 2\npass", "pass"
    names = {package: "this", other: "other"}
    used: dict[tuple[Path, str, str], list[float]] = {}
    for number in range(rounds):
        with ExitStack() as stack:
            notebooks = {
                each: stack.enter_context(Plan(package=each).warm(runs=25, env=stack.enter_context(full_history())))
                for each in (names if number % 2 else reversed(names))
            }
            time.sleep(ALL_SAVED_S)
            for kind, (cells, pause_s) in kinds.items():
                for code in (cell, plain):
                    for each, notebook in notebooks.items():
                        used.setdefault((each, kind, code), []).append(_cpu_ms(notebook, code, cells, pause_s))
    for kind in kinds:
        plain_ms = statistics.median(of for each in names for of in used[each, kind, plain])
        added = {each: statistics.median(used[each, kind, cell]) - plain_ms for each in names}
        for each, name in names.items():
            whole = used[each, kind, cell]
            texts = f"{statistics.median(whole):6.2f} (best {min(whole):5.2f})", f"{added[each]:6.2f}"
            print(f"{kind:18} {name:6} cell {texts[0]}  more than plain `pass` ({plain_ms:.2f}) {texts[1]} ms")
        print(f"{kind:18} this / other {added[package] / added[other]:.2f}")


def _cpu_ms(notebook: Notebook, code: str, cells: int, pause_s: float) -> float:
    before_s = _process_time(notebook)
    for _ in range(cells):
        notebook.good(code)
        time.sleep(pause_s)
    time.sleep(ALL_SAVED_S)
    return 1000 * (_process_time(notebook) - before_s) / cells


def _process_time(notebook: Notebook) -> float:
    """Return the processor time of the kernel in seconds, threads included that have ended, as that of the history."""
    return float(notebook.value("__import__('time').process_time()"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT, help="folder that `jupyter_distrib` is imported from")
    parser.add_argument("--visits", action="store_true", help="also print each function in the order of the calls")
    parser.add_argument("--cpu", type=Path, metavar="OTHER", help="compare processor times with the package in OTHER")
    options = parser.parse_args()
    package = options.package.resolve()
    if options.cpu:
        show_cpu(package, options.cpu.resolve())
    else:
        show_counts(package, options.visits)


if __name__ == "__main__":
    main()
