"""The view of a run as text, while it goes on and afterwards. Kernel side; pure functions of a `RunRecord`.

Terminals, diffs and logs show it for a saved notebook, so it is short, complete in its counts, and says where the rest
is. `kernel/views/html.py` says the same as HTML. Equal lines of several ranks are merged.

    2 ranks · ddp · local · cpu · 0:41
    [0] epoch 1 loss 0.52
    [1] epoch 1 loss 0.53
    [0-1] saved
    ... 19,800 lines not shown here; %distributed_logs r-7 shows all
    rank 0  running  epoch 45/100 ▓▓▓▓░░░░ 33 it/s, 0:02 left  loss 0.31
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

from jupyter_distrib.kernel.analysis.failures import cause, in_brief, own_traceback
from jupyter_distrib.kernel.analysis.lost_peers import is_consequence
from jupyter_distrib.kernel.analysis.shares import Shares
from jupyter_distrib.kernel.record import not_finite
from jupyter_distrib.kernel.record.nested_progress import seconds_left
from jupyter_distrib.kernel.record.output_lines import Line
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.terminal_stream import Progress, Span, visible, without_codes
from jupyter_distrib.kernel.views import markup, shares
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import clipped, duration, rank_list, short, size

FINAL_LINES = (60, 60)
"""Numbers of output lines shown from the beginning and from the end of a run that has ended."""
RANK_LINES, ALL_RANK_LINES = 20, 640
"""Number of first lines shown of each rank in addition, and the maximum for all ranks together."""
LIVE_LINES = (10, 30)
"""The same numbers while the run is in progress: fewer, since the cell is redrawn a few times a second."""
FINAL_CHARACTERS = 1000
LIVE_CHARACTERS = 300
SOLO_RANKS = 8
"""Number of ranks above which ranks in the same state share one line."""
QUIET_S = 1.0
BAR_CELLS = 8
DISPLAY_CHARACTERS = 2000
TROUBLE_CHARACTERS = 100
COLUMNS = ("ranks", "state", "progress", "metrics", "reason", "memory")
Row = tuple[str, str, str, str, str, str]
"""The texts of a row, by `COLUMNS`; the reason is that of a failure."""
_FOLD_WINDOW = 64
"""Number of last lines among which to look for an equal line."""


def is_worth_showing(record: RunRecord, elapsed_s: float) -> bool:
    """Return whether there is anything to show: a quick run without output or failure shows only its values."""
    if not record.changes:  # nothing has happened
        return elapsed_s >= QUIET_S
    ranks = record.ranks.values()
    texts = record.line_count or record.notes or record.not_finite or record.stall
    if texts or any(rank.progress or rank.metrics or rank.displays.shown for rank in ranks):
        return True
    if _troubled(record) or any(rank.exited_early for rank in ranks):
        return True
    return not record.ended and (elapsed_s >= QUIET_S or bool(record.partial_lines()))


def as_text(
    record: RunRecord,
    elapsed_s: float,
    pool: str = "",
    *,
    always: bool = False,
    output: Sequence[OutputLine] | None = None,
) -> str:
    """Return the present view, or the final one once the record has ended; empty if nothing is worth showing.

    `elapsed_s` is by the caller's clock (`record.elapsed_s` for a replay); `pool` is the pool's name for the header.
    `output` is what `output_lines` gives, for a caller that has it; empty where it has been shown already.
    """
    if not always and not is_worth_showing(record, elapsed_s):
        return ""
    rows = statuses(record, elapsed_s)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = "\n".join(
        [
            header(record, elapsed_s, pool),
            *remarks(record),
            *map(str, output_lines(record) if output is None else output),
            *_displays(record),
            *("  ".join(filter(None, (row[0].ljust(widths[0]), row[1].ljust(widths[1]), *row[2:]))) for row in rows),
            *shares.lines(record),
        ]
    )
    return visible(lines)


def status_line(record: RunRecord, elapsed_s: float, pool: str = "") -> str:
    """Return the progress of a run in one line: the header and the first rank's row."""
    rows = statuses(record, elapsed_s)
    parts = [header(record, elapsed_s, pool), *(rows[0] if rows else ())]
    if len(rows) > 1:
        parts.append(f"({len(rows) - 1} more)")
    return visible("  ".join(filter(None, parts)))


def stream_lines(record: RunRecord, since: int) -> tuple[list[str], int]:
    """Return the lines completed after `since` (0 in the first call), with their ranks, and the next `since`."""
    lines = [_shown_line(each, FINAL_CHARACTERS) for each in _folded_lines(record.lines_since(since))]
    return [str(line) for line in lines], record.entry_count


def header(record: RunRecord, elapsed_s: float, pool: str = "") -> str:
    """Return the header: `2 ranks · ddp · local · cpu · 0:41`; a short run has fewer parts."""
    ranks = sorted(record.ranks)
    count = f"{len(ranks)} rank{'s' * (len(ranks) != 1)}"
    parts = [count if len(ranks) == record.world_size else f"{rank_list(ranks)} of {record.world_size}"]
    if record.strategy not in ("", "none"):
        parts.append(record.strategy)
    if elapsed_s >= QUIET_S:
        parts += [pool] if pool else []
        parts.append(_devices(record))
    parts.append(clock(elapsed_s) if elapsed_s >= 10 and not record.ended else duration(elapsed_s))
    return " · ".join(parts)


def clock(seconds: float) -> str:
    """Format seconds as `0:41`, `12:05` or `1:02:03`."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _devices(record: RunRecord) -> str:
    """Format the devices of the ranks: `cpu`, `2 × A100`."""
    names = [device_name(rank.device_name) or rank.device.partition(":")[0] for rank in record.ranks.values()]
    counts = {name: names.count(name) for name in names if name not in ("", "cpu")}
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or ("cuda" if record.gpus else "cpu")


def device_name(name: str) -> str:
    """Return the short name of a device: `A100` for `NVIDIA A100-SXM4-80GB (GPU 0)`."""
    return name.partition(" (")[0].removeprefix("NVIDIA ").partition("-")[0].strip()


def remarks(record: RunRecord) -> list[str]:
    """Return the sentences about the run, each once, with its ranks."""
    about: dict[str, list[int]] = {record.remark: []} if record.remark else {}
    for note in record.notes:
        about.setdefault(note.text, []).extend([] if note.rank is None else [note.rank])
    about |= record.not_finite
    early = [rank.rank for rank in record.ranks.values() if rank.exited_early]
    if early:
        about["left the cell early with sys.exit()"] = early
    if record.stall is not None:
        about[record.stall.text] = []
    if sentence := Shares.of(record).sentence:
        about[sentence] = []
    return [f"· {rank_list(ranks)}: {text}" if ranks else f"· {text}" for text, ranks in about.items()]


# ---------------------------------------------------------------------------------------------------- output lines


@data_class
class OutputLine:
    """A line as it is shown."""

    head: str = ""
    """The ranks that wrote it: `[0-3] `."""
    text: str
    spans: tuple[Span, ...] = ()
    """The coloured parts of the text."""

    def __str__(self) -> str:
        return self.head + self.text


def output_lines(record: RunRecord) -> list[OutputLine]:
    """Return the lines of output to show: the first ones, at the end of a run those of each rank, and the last ones,
    with a line between them that says how many are left out."""
    first, last = FINAL_LINES if record.ended else LIVE_LINES
    characters = FINAL_CHARACTERS if record.ended else LIVE_CHARACTERS
    folded = _folded_lines([*record.lines_since(), *record.partial_lines()])
    if len(folded) > first + last:
        beginning, left_out = _beginning(folded[:-last], first, len(record.ranks) if record.ended else 0)
        gap = [_Folded(Line(rank=None, skipped=left_out))] if left_out else []
        folded = [*beginning, *gap, *folded[-last:]]
    return [_shown_line(each, characters, record.run) for each in folded]


def _beginning(folded: Sequence[_Folded], first: int, ranks: int) -> tuple[list[_Folded], int]:
    """Return the first lines, and the first ones of each rank, with the number of other lines."""
    most = min(RANK_LINES, ALL_RANK_LINES // ranks) if ranks else 0
    counts: Counter[int] = Counter()
    shown, left_out = [], 0
    for index, each in enumerate(folded):
        if index < first or any(counts[rank] < most for rank in each.ranks):
            shown.append(each)
            counts.update(each.ranks)
        else:
            left_out += each.weight
    return shown, left_out


def _shown_line(folded: _Folded, characters: int, run: str = "") -> OutputLine:
    line = folded.line
    if line.skipped:
        of_rank = "" if line.rank is None else f" of rank {line.rank}"
        where = f"; %distributed_logs {run} shows all" if run else ""
        return OutputLine(text=f"... {line.skipped:,} line{'s' * (line.skipped != 1)}{of_rank} not shown here{where}")
    ranks = rank_list(folded.ranks).partition(" ")[2].replace(" ", "")
    head = f"[{ranks}{'!' if line.stream == 'stderr' else ''}] "
    return OutputLine(head=head, text=clipped(line.text, characters), spans=line.spans)


def _displays(record: RunRecord) -> list[str]:
    """Return the displays of the ranks as lines of text."""
    lines = []
    for rank in record.ranks.values():
        for display in rank.displays.shown:
            text = clipped(displayed_text(display.data), DISPLAY_CHARACTERS)
            lines += [f"[{rank.rank}] {line}" for line in text.splitlines()]
    return lines


def displayed_text(data: Mapping[str, str]) -> str:
    """Return a display's text, or the names of its MIME types if it has none."""
    text = markup.text_of(data)
    return f"({', '.join(sorted(data))})" if text is None else without_codes(text)


# ---------------------------------------------------------------------------------------------------- status lines


def _troubled(record: RunRecord) -> bool:
    return any(rank.state in ("failed", "lost", "interrupted") for rank in record.ranks.values())


def statuses(record: RunRecord, elapsed_s: float) -> list[Row]:
    ranks = list(record.ranks.values())
    telling = any(rank.progress or rank.metrics for rank in ranks) or _troubled(record)
    if not telling and (record.ended or elapsed_s < QUIET_S):
        return []
    groups: dict[tuple[str, ...], list[RankRecord]] = {}
    root = cause(record) if _troubled(record) else None
    for rank in ranks:
        alike = (rank.state, _trouble(record, rank, root), own_traceback(record, rank))
        loops = "/".join(bar.label for bar in rank.progress)
        key = (*alike, loops if len(ranks) > SOLO_RANKS else "" if alike[1] else str(rank.rank))
        groups.setdefault(key, []).append(rank)
    rows = sorted(groups.values(), key=lambda group: not _is_root(record, group[0]))
    return [_status(record, group, root, ended=record.ended) for group in rows]


def _is_root(record: RunRecord, rank: RankRecord) -> bool:
    """Return whether a rank failed or died by itself; such ranks are shown first."""
    return rank.state in ("failed", "lost") and not is_consequence(record, rank) and not (rank.exit and rank.exit.asked)


def _status(record: RunRecord, group: Sequence[RankRecord], root: int | None, *, ended: bool) -> Row:
    """Return one row for ranks in the same state, with the bar of the slowest."""
    slowest = min(group, key=lambda rank: [bar.step for bar in rank.progress])
    most = max(group, key=lambda rank: [bar.step for bar in rank.progress])
    left_s = seconds_left(slowest.progress)
    bars = " · ".join(
        _bar(slow, fast, running=slowest.state == "running", left_s=left_s if slow is slowest.progress[-1] else None)
        for slow, fast in zip(slowest.progress, most.progress, strict=False)
    )
    metrics = _metrics(group) or (slowest.progress[-1].detail if slowest.progress else "")
    ranks = rank_list(rank.rank for rank in group)
    return ranks, slowest.state, bars, metrics, _trouble(record, slowest, root), _memory(group, ended=ended)


def _memory(group: Sequence[RankRecord], *, ended: bool) -> str:
    """Format the memory in use, or at the end the peak: the largest among the ranks of the group."""
    on_gpu = [rank for rank in group if rank.gpu_memory_bytes is not None]
    if ended:
        peak = max((rank.peak_gpu_memory_bytes or 0 if on_gpu else rank.peak_rss_bytes) for rank in group)
        return f"peak {size(peak)}" if peak else ""
    if on_gpu:
        used = max(rank.gpu_memory_bytes or 0 for rank in on_gpu)
        busy = [rank.gpu_percent for rank in on_gpu if rank.gpu_percent is not None]
        return size(used) + (f", {min(busy):.0f} % busy" if busy else "")
    used = max(rank.rss_bytes for rank in group)
    return f"{size(used)}, {max(rank.cpu_percent for rank in group):.0f} % CPU" if used else ""


def _trouble(record: RunRecord, rank: RankRecord, root: int | None) -> str:
    """Return a phrase on why a rank did not reach its end; `root` is the rank that failed first."""
    follows = rank.state == "interrupted" or is_consequence(record, rank)
    if follows and root not in (None, rank.rank):
        return f"stopped because of rank {root}"
    if is_consequence(record, rank):
        return "stopped because another rank was gone"
    left = len(rank.failure.message.strip().splitlines()) - 1 if rank.failure is not None else 0
    rest = f" ... ({left:,} more line{'s' * (left != 1)})" if left > 0 else ""
    return clipped(in_brief(record, rank), TROUBLE_CHARACTERS) + rest


def _metrics(group: Sequence[RankRecord]) -> str:
    """Format the metrics of one rank, or their range over several ranks; a nan is listed with its ranks."""
    texts = []
    for name in dict.fromkeys(name for rank in group for name in rank.metrics):
        values = {rank.rank: rank.metrics[name] for rank in group if name in rank.metrics}
        numbers = [value for value in values.values() if isfinite(value)]
        odd = {rank.rank: rank.not_finite[name] for rank in group if not isfinite(rank.metrics.get(name, 0.0))}
        low, high = (f"{edge(numbers, default=nan):.4g}" for edge in (min, max))
        known = "" if not numbers else low if low == high else f"{low} to {high}"
        sentence = not_finite.of_ranks(odd, len(values))
        texts.append(
            f"{short(name)} {known} ({sentence})" if known and sentence else f"{short(name)} {known or sentence}"
        )
    return "  ".join(texts)


def _bar(slow: Progress, fast: Progress, *, running: bool, left_s: float | None) -> str:
    """Format a progress bar: `epoch 45/100 ▓▓▓▓░░░░ 33 it/s, 0:02 left`; the time left is that of all loops."""
    steps = amount(slow.step) if slow.step == fast.step else f"{amount(slow.step)}-{amount(fast.step)}"
    parts = [short(slow.label)] if slow.label else []
    parts.append(steps if slow.total is None else f"{steps}/{amount(slow.total)}")
    if slow.total:
        filled = max(0, min(BAR_CELLS, int(BAR_CELLS * slow.step / slow.total)))
        parts.append("▓" * filled + "░" * (BAR_CELLS - filled))
    if running and slow.rate and not slow.finished:
        left = "" if left_s is None else f", {clock(left_s)} left"
        parts.append(_rate(slow) + left)
    return " ".join(parts)


def _rate(bar: Progress) -> str:
    rate = bar.rate or 0.0
    return f"{amount(rate)} {bar.unit}/s" if rate >= 1 else f"{1 / rate:.3g} s/{bar.unit}"


def amount(number: float) -> str:
    """Format a number: `45`, `1.5`, `33`, `12.3k`, `629M`."""
    for letter, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 10 * factor or (number >= factor and letter != "k"):
            return f"{number / factor:.3g}{letter}"
    return str(int(number)) if number == int(number) or number >= 100 else f"{number:.3g}"


@dataclass(slots=True)
class _Folded:
    """A line of output, and the ranks that wrote exactly this line."""

    line: Line
    ranks: list[int] = field(default_factory=list)

    @property
    def weight(self) -> int:
        return self.line.skipped or len(self.ranks)


def _folded_lines(lines: Iterable[Line]) -> list[_Folded]:
    """Merge equal lines of several ranks that are near each other; the lines of each rank keep their order.

    Ranks send their lines in batches, so equal lines are rarely direct neighbours.
    """
    folding = _Folding()
    for line in lines:
        if line.skipped:
            folding.add_gap(line)
        elif not line.cleared:
            folding.add(line)
    return folding.folded


class _Folding:
    """The lines so far, with equal ones merged."""

    def __init__(self) -> None:
        self.folded: list[_Folded] = []
        self._last: dict[tuple[str, str], int] = {}
        """The last position of each text and stream: the first lines of a batch often equal those of the batch before,
        which is out of reach."""

    def add_gap(self, gap: Line) -> None:
        before = self.folded[-1].line if self.folded else None
        if before is None or not before.skipped:
            self.folded.append(_Folded(gap))
            return
        rank = gap.rank if gap.rank == before.rank else None
        self.folded[-1].line = Line(rank=rank, skipped=before.skipped + gap.skipped)

    def add(self, line: Line) -> None:
        key = line.text, line.stream
        if (place := self._equal_place(line, self._last.get(key, -1))) is None:
            self._last[key] = len(self.folded)
            self.folded.append(_Folded(line, _ranks(line)))
        else:
            self._join(place, line)

    def _equal_place(self, line: Line, last: int) -> int | None:
        """Return the first equal line near the end that this rank may join, after the last one it shares; `last` is the
        position of the last equal line."""
        place, oldest = None, max(0, len(self.folded) - _FOLD_WINDOW)
        for index in range(len(self.folded) - 1, oldest - 1, -1) if last >= oldest else ():
            other = self.folded[index]
            if other.line.skipped or (line.rank in other.ranks and len(other.ranks) > 1):
                break
            if other.line.text == line.text and other.line.stream == line.stream and line.rank not in other.ranks:
                place = index
        return place

    def _join(self, place: int, line: Line) -> None:
        """Add the rank to a line; lines that only this rank wrote before move in front of it."""
        behind = self.folded[place:]
        own = [each for each in behind if line.rank in each.ranks]
        rest = [each for each in behind if line.rank not in each.ranks]
        rest[0].ranks += _ranks(line)
        if own:
            self.folded[place:] = own + rest
            self._last |= {(each.line.text, each.line.stream): at for at, each in enumerate(own + rest, place)}


def _ranks(line: Line) -> list[int]:
    return [] if line.rank is None else [line.rank]
