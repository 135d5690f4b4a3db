"""The exception that a cell raises for a run that did not end well. Kernel side; pure functions of a `RunRecord`.

    cause(record)         the rank that is the root of the failure: the others mostly failed because of it
    to_exception(...)     the user's own exception type, with a text for each rank
    to_interrupt(...)     a KeyboardInterrupt that says where each rank was
    to_early_interrupt(.) a KeyboardInterrupt that says where the kernel was, before there was a run
    to_timeout(...)       a RunTimeout that says where each rank was
    remote_error(...)     a RemoteError in place of an exception that the kernel cannot rebuild, or must not raise

Every exception of this module carries its own rendering in `_render_traceback_`, which IPython (>= 7) calls on the
instance (`InteractiveShell.showtraceback`). The rendering is made at once, as lines of text, so that the exception
still pickles. The same text is a note of the exception, for a script and a log, whose tracebacks have no frame of a
rank.
"""

from __future__ import annotations

import asyncio
import bdb
import builtins
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from jupyter_distrib.errors import RankLost, RemoteError, RunTimeout
from jupyter_distrib.kernel.analysis.lost_peers import is_consequence
from jupyter_distrib.kernel.analysis.traceback_text import (
    Paint,
    Rendering,
    SourceOf,
    chain,
    fingerprint,
    frame_lines,
    headline,
    innermost,
    is_user,
    opening,
    user_frames,
    where,
)
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system import call_parts
from jupyter_distrib.system.formatting import clipped, duration, rank_list, size
from jupyter_distrib.wire import messages as m

Unpack = Callable[[m.Parcel], BaseException | None]

E = TypeVar("E", bound=BaseException)
LAST_LINES = 20
MOST_LINES = 200
"""Maximum number of lines of a traceback that outlives its kernel: an exception may have any number of notes."""
LINE_CHARACTERS = 2000

_BUS_ERROR = (
    "It has used memory of a file that has no room for it, as in a full /dev/shm: `df -h /dev/shm` on its machine "
    "shows the room, and --shm-size=8g gives a container of Docker more."
)
_CRASHES = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"}


# ---------------------------------------------------------------------------------------------------- who is the cause


def cause(record: RunRecord) -> int | None:
    """Return the rank whose failure or death made the run fail; None if no rank failed or died.

    Possible roots are deaths that we did not request, and exceptions that do not merely report a lost peer; the
    earliest of them is the cause. If there are only consequences (the true root may be outside), the earliest one is.
    """
    troubles = [(at_s, rank) for rank in record.ranks.values() if (at_s := _trouble_at_s(rank)) is not None]
    roots = [(at_s, rank) for at_s, rank in troubles if not is_consequence(record, rank)] or troubles
    return min(roots, key=lambda trouble: trouble[0])[1].rank if roots else None


def first_trouble(record: RunRecord, cause: int, characters: int) -> str:
    """Return the failure that made the run fail in one line, with all ranks that failed in exactly the same way:
    `ranks 0-3: KeyError: 'lr'`."""
    rank = record.ranks[cause]
    ranks = (cause,) if rank.failure is None else _alike(record, rank)
    return f"{rank_list(ranks)}: {clipped(in_brief(record, rank), characters)}"


def traceback_of(record: RunRecord) -> list[str]:
    """Return the lines of the traceback that a failed run raises, with the failing line of each frame only; empty if
    no rank failed or died."""
    if cause(record) is None:
        return []
    exception = to_exception(record, lambda _: None, lambda _: None, record.elapsed_s)
    lines: list[str] = exception.__dict__["_render_traceback_"]()
    return [clipped(line, LINE_CHARACTERS) for line in lines[:MOST_LINES]]


def _trouble_at_s(rank: RankRecord) -> float | None:
    if rank.failure is not None:
        return rank.failed_at_s
    if rank.exit is not None and not rank.exit.asked:
        return rank.exit.at_s
    return None


def in_brief(record: RunRecord, rank: RankRecord) -> str:
    """Return one line on the failure of a rank, without the rank's number; empty without a failure."""
    if rank.failure is not None:
        return headline(rank.failure)
    if rank.exit is not None and rank.state == "lost":
        return describe_exit(rank.exit) if not rank.exit.asked else rank.exit.reason or _replaced(record, rank.exit)
    return ""


def _replaced(record: RunRecord, ended: m.Exited) -> str:
    """Return a phrase on a rank whose process was ended on purpose: it did not stop in time, or was given no time
    because other ranks were lost."""
    soon = [
        rank.rank
        for rank in record.ranks.values()
        if rank.exit is not None and not rank.exit.asked and ended.at_s - rank.exit.at_s < m.KILL_AFTER_S
    ]
    if not soon:
        return "did not stop and had to be replaced"
    return f"had to end, since {rank_list(soon)} {'was' if len(soon) == 1 else 'were'} lost"


# ---------------------------------------------------------------------------------------------------- what to raise


def to_exception(
    record: RunRecord,
    unpack: Unpack,
    source_of: SourceOf,
    elapsed_s: float,
    *,
    bold: bool = False,
    as_group: bool = False,
) -> BaseException:
    """Return the exception to raise in the cell: the root's own object if it can be unpacked.

    With `as_group` this may be an exception group, which IPython would show with frames of ours; else a stand-in takes
    its place. The exception has `.rank` (the root) and `.failures` (rank -> `Failure` or `Exited`), unless the user's
    class has such names, and renders itself. Raise it outside of any `except` block: IPython prints raw frames for an
    exception with an exception group in its context.
    """
    paint = Paint(bold)
    number = cause(record)
    if number is None:
        message = _ended_from_outside(record, elapsed_s)
        return _dressed(RankLost(message), [f"RankLost: {message}", *_others(record, set())], None, record)
    root = record.ranks[number]
    if root.failure is None:
        return _lost(record, root, source_of, paint)
    alike = _alike(record, root)
    if root.failure.code is not None:
        message = f"{rank_list(alike, sentence=True)} called {_exit_call(root.failure)}."
        lines = [
            *opening(root.failure, source_of, paint, _header(record, alike)),
            paint.strong("RankLost") + f": {message}",
        ]
        return _dressed(RankLost(message), [*lines, *_others(record, set(alike))], number, record)
    lines = chain(root.failure, source_of, paint, _header(record, alike))
    lines.append(_raised_by(alike, elapsed_s))
    exception = _object(root.failure, unpack, as_group=as_group)
    return _dressed(exception, [*lines, *_others(record, set(alike))], number, record)


def to_interrupt(record: RunRecord, elapsed_s: float, source_of: SourceOf | None = None) -> KeyboardInterrupt:
    """Return the KeyboardInterrupt of a run that the user stopped; it says where each rank was."""
    message = f"Stopped by you after {duration(elapsed_s)}."
    lines = [f"KeyboardInterrupt: {message}", *_stall(record), *_others(record, set(), source_of)]
    return _dressed(KeyboardInterrupt(message), lines, None, record)


def to_early_interrupt(frames: Sequence[m.Frame]) -> KeyboardInterrupt:
    """Return the KeyboardInterrupt for a cell that was stopped while being prepared; `frames` are the kernel's."""
    message = "Stopped by you before the ranks had begun."
    inside = [f"In {where(frame)}" for frame in frames if is_user(frame)][-1:]
    stopped = KeyboardInterrupt(message)
    stopped.__dict__["_render_traceback_"] = Rendering(lines=(f"KeyboardInterrupt: {message}", *inside))
    return stopped


def to_timeout(
    record: RunRecord,
    limit_s: float,
    elapsed_s: float,
    source_of: SourceOf | None = None,
    in_words: Callable[[str], str] = str,
) -> RunTimeout:
    """Return the RunTimeout of a run that took longer than its `--timeout`, or hung for its `--hang-timeout`; it says
    where each rank was. `in_words` returns a sentence about options in the words of the caller that began the run."""
    name = "--hang-timeout" if record.hung else "--timeout"
    why = f"its {name} is {duration(limit_s)}"
    if record.hopeless:
        why = (
            f"a rank has waited {duration(limit_s)} for one that has left the cell (--hang-timeout sets another limit)"
        )
    message = in_words(f"The run was stopped after {duration(elapsed_s)}, because {why}.")
    if record.hung:
        message = " ".join([message, *_stall(record)])
    lines = [f"RunTimeout: {message}", *_others(record, set(), source_of)]
    return _dressed(RunTimeout(message), lines, None, record)


def _stall(record: RunRecord) -> list[str]:
    return [record.stall.text] if record.stall else []


def _ended_from_outside(record: RunRecord, elapsed_s: float) -> str:
    """Return a sentence on the end of a run if no rank caused it."""
    for rank in record.ranks.values():
        if rank.exit is not None and rank.exit.reason:
            return f"The run ended after {duration(elapsed_s)}, because {rank.exit.reason}."
    return "The run ended although not every rank had finished."


def _header(record: RunRecord, ranks: Sequence[int]) -> str:
    return f"Traceback ({rank_list(ranks)} of {record.world_size})"


def _raised_by(ranks: Sequence[int], elapsed_s: float) -> str:
    same = "the same" if len(ranks) > 1 else "it"
    return f"{rank_list(ranks, sentence=True)} raised {same} after {duration(elapsed_s)}."


def _dressed(exception: E, lines: Iterable[str], rank: int | None, record: RunRecord) -> E:
    failures = {
        each.rank: each.failure or each.exit
        for each in record.ranks.values()
        if each.failure is not None or (each.exit is not None and not each.exit.asked)
    }
    if isinstance(exception, RankLost | RunTimeout):
        lines = [*lines, f"More: {exception.page}"]
    shown = Rendering(lines=tuple(lines))
    _forget_earlier_run(exception)
    add_attributes(exception, rank=rank, failures=failures)
    exception.__dict__["_render_traceback_"] = shown
    if isinstance(notes := exception.__dict__.get("__notes__", []), list):  # the user's code may have set anything
        exception.__dict__["__notes__"] = [*notes, f"\n{shown.plain()}"]
    return exception


def _forget_earlier_run(exception: BaseException) -> None:
    """Remove what an earlier run has added to an exception that code has kept and raised again on a rank."""
    own = exception.__dict__
    if isinstance(earlier := own.get("_render_traceback_"), Rendering):
        for name in ("rank", "failures", "results"):
            own.pop(name, None)
        if isinstance(notes := own.get("__notes__"), list):
            own["__notes__"] = [note for note in notes if note != f"\n{earlier.plain()}"]


def add_attributes(exception: BaseException, **values: object) -> None:
    """Set attributes of an exception, but none that it has already: the user's class may have a `rank` or `results` of
    its own."""
    taken = {name for names in (exception, *type(exception).__mro__) for name in vars(names)}
    # Not setattr: the user's class may forbid it (a frozen dataclass does).
    exception.__dict__.update({name: value for name, value in values.items() if name not in taken})


def _object(failure: m.Failure, unpack: Unpack, *, as_group: bool) -> BaseException:
    """Return the user's exception object, or a stand-in that carries its name, with its cause and context."""
    original = _unpacked(failure, unpack)
    is_group = as_group and isinstance(original, BaseExceptionGroup)
    is_shown = is_group or not isinstance(original, _SHOWN_ANOTHER_WAY)
    if original is None or not is_shown or not hasattr(original, "__dict__"):
        exception: BaseException = remote_error(failure.type_name, failure.message)
        exception.__dict__["original"] = original
    else:
        exception = original
    for each in (exception, original):
        if each is not None:
            _add_cause(each, failure, unpack)
    return exception


def _unpacked(failure: m.Failure, unpack: Unpack) -> BaseException | None:
    try:
        return unpack(failure.parcel) if failure.parcel is not None else None
    except Exception:  # noqa: BLE001 - foreign code: the exception's own __init__ or __setstate__
        return None


def _add_cause(exception: BaseException, failure: m.Failure, unpack: Unpack) -> None:
    """Give an exception its `__cause__` and `__context__`, as Python's `raise` does.

    A group among them is a stand-in, since IPython would print raw frames for an exception with one in its context.
    """
    while (inner := failure.cause) is not None:
        cause = _unpacked(inner, unpack)
        if cause is None or isinstance(cause, BaseExceptionGroup):
            cause = remote_error(inner.type_name, inner.message)
        # The class of the user may forbid to set attributes.
        BaseException.__setattr__(exception, "__context__", cause)
        if not failure.during:
            BaseException.__setattr__(exception, "__cause__", cause)
        exception, failure = cause, inner


# ---------------------------------------------------------------------------------------------------- a dead process


def _lost(record: RunRecord, root: RankRecord, source_of: SourceOf, paint: Paint) -> RankLost:
    assert root.exit is not None
    message = f"Rank {root.rank} {describe_exit(root.exit)}."
    lines = [paint.strong("RankLost") + f": {message}"]
    if root.exit.exit_code == -signal.SIGBUS:
        lines += [_BUS_ERROR]
    if frames := user_frames(root.exit.frames):
        lines += ["It was here:", *frame_lines(frames, source_of, paint)]
    if root.exit.last_lines:
        lines += ["The last lines that it wrote to standard error:"]
        lines += [f"    {clipped(text, 500)}" for text in root.exit.last_lines[-LAST_LINES:]]
    return _dressed(RankLost(message), [*lines, *_others(record, {root.rank})], root.rank, record)


def describe_exit(ended: m.Exited) -> str:
    """Return a phrase on how a process ended, to follow `rank 2 `."""
    return _manner(ended) + (f" while it was loading {call_parts.named(ended.loading)}" if ended.loading else "")


def _manner(ended: m.Exited) -> str:
    code = ended.exit_code
    if ended.cause:
        return f"was replaced, because {ended.cause}"
    if code is None and ended.reason:
        return f"is gone, because {ended.reason}"
    if code is None:
        return "is gone; it is unknown how its process ended"
    if code >= 0:
        return f"left the process (os._exit or a C exit, status {code}) before it finished"
    name, words = _signal(-code)
    if ended.out_of_memory:
        peak = f"peak {size(ended.peak_rss_bytes)}" if ended.peak_rss_bytes else ""
        limit = f"the limit of memory is {size(ended.memory_limit_bytes)}" if ended.memory_limit_bytes else ""
        measured = "; ".join(filter(None, (peak, limit)))
        memory = f" ({measured})" if measured else ""
        return f"was killed by {name}, by the system's out-of-memory killer{memory}"
    return f"crashed with {name} ({words})" if name in _CRASHES else f"was killed by {name}"


def _signal(number: int) -> tuple[str, str]:
    try:
        return signal.Signals(number).name, (signal.strsignal(number) or "").lower()
    except ValueError:
        return f"signal {number}", "a real-time signal"


def _exit_call(failure: m.Failure) -> str:
    said = failure.message if failure.code == 1 and failure.message not in ("", "1", "True") else failure.code
    return f"sys.exit({said!r})"


# ---------------------------------------------------------------------------------------------------- the other ranks


def own_traceback(record: RunRecord, rank: RankRecord) -> str:
    """Return a key that ranks with equal tracebacks share; empty if the rank did not fail or only lost another rank."""
    return fingerprint(rank.failure) if rank.failure is not None and not is_consequence(record, rank) else ""


def _alike(record: RunRecord, root: RankRecord) -> tuple[int, ...]:
    """Return the root, and the ranks whose traceback is identical to the root's."""
    assert root.failure is not None
    key = fingerprint(root.failure)
    return tuple(
        rank.rank for rank in record.ranks.values() if rank.failure is not None and fingerprint(rank.failure) == key
    )


def _others(record: RunRecord, shown: set[int], source_of: SourceOf | None = None) -> list[str]:
    """Return one line for each group of ranks that ended alike."""
    has_root = bool(shown)
    waited = any(_operation(_last_frames(rank)) for rank in record.ranks.values())
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in record.ranks.values():
        if rank.rank not in shown:
            story = _story(record, rank, has_root, source_of)
            story += ", while others were waiting for it" if story == _LEFT_EARLY and waited else ""
            groups.setdefault((story, own_traceback(record, rank)), []).append(rank.rank)
        elif rank.exit is not None and rank.exit.asked:
            groups.setdefault((" replaced: names kept there are gone", ""), []).append(rank.rank)
    stories = {_story(record, record.ranks[rank], has_root, source_of) for rank in shown}
    lines = []
    for (story, _), ranks in groups.items():
        lines.append(rank_list(ranks, sentence=True) + story + (" (another traceback)" if story in stories else ""))
        stories.add(story)
    return lines


_LEFT_EARLY = " had left the cell early with sys.exit()"


def _last_frames(rank: RankRecord) -> tuple[m.Frame, ...]:
    return rank.failure.frames if rank.failure is not None else rank.stopped_at


def _story(record: RunRecord, rank: RankRecord, has_root: bool, source_of: SourceOf | None) -> str:
    """Return a phrase on how a rank ended, to follow its number."""
    if rank.failure is not None:
        return _failure_story(record, rank, has_root, source_of)
    if rank.exit is not None and not (rank.exit.asked and rank.returned):
        where = _where(rank.stopped_at, source_of)
        if rank.exit.reason:
            return " had not finished: names kept there are gone"
        if rank.exit.asked:
            ended = f" {_replaced(record, rank.exit)}: names kept there are gone"
            return ended + (f" (was at {where})" if where else "")
        return f" {describe_exit(rank.exit)}"
    if rank.state == "interrupted":
        where = _where(rank.stopped_at, source_of)
        return _stopped_story(rank.stopped_at, where, has_root)
    if rank.exited_early:
        return _LEFT_EARLY
    if rank.state == "done":
        return " had finished"
    return " had not started" if rank.started_at_s is None else " had not finished"


def _failure_story(record: RunRecord, rank: RankRecord, has_root: bool, source_of: SourceOf | None) -> str:
    assert rank.failure is not None
    where = _where(rank.failure.frames, source_of)
    at = f" at {where}" if where else ""
    if is_consequence(record, rank):
        return _stopped_story(rank.failure.frames, where, has_root)
    if rank.failure.code is not None:
        return f" called {_exit_call(rank.failure)}{at}"
    return f" raised {clipped(headline(rank.failure), 200)}{at}"


def _stopped_story(frames: Sequence[m.Frame], where: str, has_root: bool) -> str:
    if has_root:
        return f" stopped because of it{_operation(frames)}" + (f" at {where}" if where else "")
    return f": {where}" if where else " stopped"


def _operation(frames: Sequence[m.Frame]) -> str:
    """Return the collective in which a rank was waiting, in brackets; empty if it waited in none."""
    inside = [frame.function for frame in frames if "distributed_c10d" in frame.filename]
    names = [name for name in inside if not name.startswith("_") and name != "wrapper"]
    return f" (in {names[0]})" if names else ""


def _where(frames: Sequence[m.Frame], source_of: SourceOf | None) -> str:
    """Return the innermost line of the user's code: `Cell In[5], line 14, in train: loss.backward()`."""
    if (frame := innermost(frames)) is None:
        return ""
    source = source_of(frame.filename) if source_of else None
    text = source[frame.line - 1].strip() if source and 0 < frame.line <= len(source) else frame.text
    return where(frame) + (f": {clipped(text, 120)}" if text else "")


_SHOWN_ANOTHER_WAY = (
    SyntaxError, BaseExceptionGroup, SystemExit, GeneratorExit, asyncio.CancelledError, bdb.BdbQuit
)  # fmt: skip
"""Types that IPython or ipykernel treat specially, without a call of `_render_traceback_`: they would print our frames
or nothing, end the kernel, or count as cancelled. A `RemoteError` of the same name takes their place and has them as
`original`."""


def remote_error(type_name: str, message: str) -> RemoteError:
    """Return a `RemoteError` that pickles, whose class has the name of the exception that it replaces.

    In place of a builtin exception, it is also caught as that type: `except KeyError` works.
    """
    return _remote_type(type_name)(message)


class _StandIn(RemoteError):
    type_name = ""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # not super(): a builtin beside this class may require other arguments

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return remote_error, (self.type_name, self.args[0]), dict(self.__dict__)


@lru_cache(maxsize=256)
def _remote_type(type_name: str) -> type[_StandIn]:
    module, _, name = type_name.rpartition(".")
    bases: tuple[type[_StandIn], ...] | tuple[type[_StandIn], type[Exception]] = (_StandIn,)
    builtin = getattr(builtins, type_name, None)
    if isinstance(builtin, type) and issubclass(builtin, Exception) and not issubclass(builtin, _SHOWN_ANOTHER_WAY):
        bases = (_StandIn, builtin)

    namespace = {"__module__": module or RemoteError.__module__, "type_name": type_name}
    return type(name or "RemoteError", bases, namespace)
