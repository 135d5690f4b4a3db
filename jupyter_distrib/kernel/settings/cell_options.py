"""The options of a cell, and the magic line that holds them; `kernel/settings/help.py` describes them.

Runs in the kernel and wherever a strategy or pool declares its options; standard library only, no state.

    %%distributed --gpus 2 --strategy ddp     --parse_line-->     Options    --to_line--> an equivalent magic line
    gpus=2, strategy="ddp"                    --keywords.py-->    Options

An option is declared once, as a field of `Options` or in the tuple of a strategy or pool; everything else in this file
is derived from that. Both ways end in `options.gather`, so a line and a call get the same errors.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.interfaces import stand_ins
from jupyter_distrib.kernel import trackers
from jupyter_distrib.options import (
    Declared,
    NumberRange,
    Option,
    Owners,
    Say,
    as_flag,
    at_least_zero,
    check_choice,
    count,
    count_or_range,
    expression,
    names,
    not_an_option,
    one_name,
    parse_arguments,
    rank_list,
    seconds,
    shown,
    size_bytes,
    size_or_none,
    split_words,
    switch,
    takes,
    variable,
)
from jupyter_distrib.pools.base import DEFAULT_KIND
from jupyter_distrib.system import call_parts, notification
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m


@data_class
class GroupSize:
    """The requested number of ranks, and their device; `GroupSize()` stands for the pool's default."""

    count: int | None = None
    """The number of ranks; None: one for each GPU of the pool, 2 if it has none."""
    gpus: bool = True
    """Whether each rank has a GPU, if the pool has any; False: CPU ranks."""
    gpu_type: str = ""
    """The text that the names of the GPUs must contain; empty for any type."""
    least: int = 0
    """The minimum number of ranks, if fewer than `count` will do; 0: exactly `count`."""
    step: int = 1
    """The number of which any such number is a multiple."""

    @property
    def several(self) -> range:
        """The numbers of ranks that will do, if there are several; else empty."""
        return range(self.least, (self.count or 0) + 1, self.step) if self.least else range(0)

    @property
    def fewest(self) -> int | None:
        """The number of ranks that must be there; None for the pool's default."""
        return self.least or self.count

    def on_cpus(self) -> GroupSize:
        """Return the equivalent size for a pool without GPUs."""
        return replace(self, count=self.ranks(0), gpus=False)

    def ranks(self, gpus: int) -> int:
        """Return the number of ranks on a pool that has this many GPUs for them."""
        return m.number_of_ranks(self.count or 0, gpus if self.gpus else 0)


MAGIC = "%%distributed"
DEFAULT_STRATEGY = "none"
AUTO_STRATEGY = "auto"
"""The strategy in whose place a dry run puts one that fits."""
DEFAULT_POOL = DEFAULT_KIND


_CHOSEN = {"strategy": DEFAULT_STRATEGY, "pool": DEFAULT_POOL}


def _declared(initial: object, flag: str, metavar: str, meaning: str, **more: Any) -> Any:
    return field(default=initial, metadata={"option": Option(flag=flag, metavar=metavar, meaning=meaning, **more)})


def _trackers(name: str, text: str) -> tuple[str, ...]:
    asked = names(name, text)
    for each in asked:
        check_choice(each, (*trackers.names(), trackers.NONE), f"{name} {each}")
    return asked


def _platforms(name: str, text: str) -> tuple[str, ...]:
    asked = names(name, text)
    for each in asked:
        check_choice(each, stand_ins.PLATFORMS, f"{name} {each}")
    return asked


HISTORY = Option(flag="--history", metavar="N", meaning="saved runs that are kept, 0 for none", read=at_least_zero)
HISTORY_DAYS = Option(flag="--history-days", metavar="DAYS", meaning="how long a run is kept", read=at_least_zero)
"""The history options of the settings files."""


def _notify(name: str, text: str) -> str:
    if not text.isprintable():
        raise OptionsError(f"{name} must be a command or an address of one line; got {shown(text)}")
    if "://" in text.split(maxsplit=1)[0] and not notification.is_address(text):
        raise OptionsError(f"{name} must be a command, or an address that begins with https://; got {shown(text)}")
    return text


NOTIFY = Option(flag="--notify", metavar="TARGET", meaning="command or webhook to notify when a run ends", read=_notify)
NOTIFY_AFTER = Option(
    flag="--notify-after", metavar="S", meaning="only about runs of at least S seconds", read=at_least_zero
)
COMPAT = Option(flag="--compat", metavar="NAMES", meaning="platforms whose import names are served", read=_platforms)
"""The option of the settings files that `%distributed_compat` sets in a notebook."""


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one cell or call; None, empty values and False stand for options that are not given."""

    gpus: int | None = _declared(
        None, "--gpus", "N",
        "N ranks with one GPU each, or 2:8 for as many as there are; where the pool has no GPU at all, N CPU ranks",
        read=count_or_range, unasked=True, main=True,
        default="all GPUs of the pool, else 2 CPU ranks", synonyms=("devices", "num-gpus", "nproc-per-node"))
    ranks: int | None = _declared(
        None, "--ranks", "N", "N CPU ranks, or 2:8 for as many as there is room for",
        read=count_or_range, unasked=True, main=True,
        synonyms=("cpus", "np", "num-processes", "num-workers", "workers", "world-size"))
    gpu_type: str | None = _declared(
        None, "--gpu-type", "TYPE", "GPUs of this type only, such as A10; refused where there is none",
        read=not_an_option, default="any type", synonyms=("accelerator", "accelerator-type", "gpu-model"))
    numa_binding: str | None = _declared(
        None, "--numa-binding", "HOW", "bind each rank to the processors near its GPU, by torchrun's names",
        choices=("node", "socket", "exclusive", "core-complex"), default="all processors",
        synonyms=("numa", "cpu-affinity"))
    strategy: str | None = _declared(
        None, "--strategy", "NAME", "how the ranks work together; `none` sets torchrun's environment only",
        default=DEFAULT_STRATEGY, unasked=True)
    pool: str | None = _declared(
        None, "--pool", "NAME", "where the ranks are", default=DEFAULT_POOL, synonyms=("cluster",))
    out: str | None = _declared(None, "--out", "NAME", "bind the Results of all ranks to this name", read=one_name)
    keep: tuple[str, ...] = _declared(
        (), "--keep", "NAMES", "leave these names on the ranks; the notebook gets a handle",
        read=names, repeatable=True)
    with_: tuple[str, ...] = _declared(
        (), "--with", "NAMES", "also send these names, which the cell reaches only through exec or a string",
        read=names, repeatable=True, keyword="with_")
    on: tuple[int, ...] | None = _declared(
        None, "--on", "RANKS", "run on these ranks of the warm pool only, such as 0,2-3", read=rank_list,
        default="all ranks")
    timeout_s: float | None = _declared(
        None, "--timeout", "S", "stop after S seconds", read=seconds, default="no limit", keyword="timeout_s")
    wait_s: float | None = _declared(
        None, "--wait", "S", "wait up to S seconds for ranks or GPUs that are busy", read=seconds,
        default="refuse at once, and say who has them", keyword="wait_s")
    hang_timeout_s: float | None = _declared(
        None, "--hang-timeout", "S", "stop when ranks have waited S seconds for others in one place", read=seconds,
        default="warn only; 60 where they wait for a rank that has left the cell", keyword="hang_timeout_s")
    max_restarts: int | None = _declared(
        None, "--max-restarts", "N", "start the cell again when a rank is lost, at most N times", read=count,
        default="end with the first loss", synonyms=("max-retries",))
    min_ranks: int | None = _declared(
        None, "--min-ranks", "M", "after a restart, continue with fewer ranks, at least M, if the lost ones cannot be "
        "replaced", read=count, default="only with all ranks")
    grow_after_s: float | None = _declared(
        None, "--grow-after", "S", "with --gpus 2:8 or --ranks 2:8, start the cell again from its checkpoint with more "
        "ranks when there is room, at most once in S seconds", read=seconds, default="600", keyword="grow_after_s")
    restart_on: str | None = _declared(
        None, "--restart-on", "WHAT", "with `error`, also when a rank raises an exception", default="lost",
        choices=("lost", "error"))
    check: bool = _declared(
        False, "--check", "", "fail at once when ranks call different collectives, or with different shapes",
        read=switch)
    backend_fallback: bool = _declared(
        False, "--backend-fallback", "", "on CPU ranks, give a cell that asks init_process_group for NCCL a gloo group",
        read=switch)
    debug: bool = _declared(
        False, "--debug", "", "open the debugger's prompt in the rank that failed first", read=switch,
        synonyms=("pdb", "post-mortem"))
    profile: int | None = _declared(
        None, "--profile", "[STEPS]", "record some steps of the training, or the cell, in one trace of all ranks",
        read=count, bare="8", default="no profile; alone, 8 steps", synonyms=("trace", "profiler"))
    detach: bool = _declared(
        False, "--detach", "", "return a Run at once", read=switch, synonyms=("async", "background"))
    fresh: bool = _declared(False, "--fresh", "", "run in new processes", read=switch, synonyms=("new", "restart"))
    warm: bool = _declared(
        False, "--warm", "", "run a script in the processes of earlier cells and scripts, as cells always do",
        read=switch)
    env: dict[str, str] = field(default_factory=dict, metadata={"option": Option(
        flag="--env", metavar="K=V", meaning="set an environment variable on the ranks; may be given again",
        read=variable, repeatable=True)})
    max_capture: int | None = _declared(
        None, "--max-capture", "SIZE", "refuse to send more than SIZE of the notebook's values, such as 1GB",
        read=size_bytes, default="no limit, a warning from 100 MB on")
    cache: int | None = _declared(
        None, "--cache", "SIZE", "memory on each machine for large values that were sent, so that unchanged ones are "
        "not sent again; 0 for none", read=size_or_none,
        default="a quarter of /dev/shm or of the free memory, whichever is less")
    track: tuple[str, ...] = _declared(
        (), "--track", "NAMES", "record the run in these experiment trackers: {trackers}; or `none`",
        read=_trackers, repeatable=True,
        default="the trackers that the code uses or that have a run open in the notebook")
    sweep: dict[str, str] = field(default_factory=dict, metadata={"option": Option(
        flag="--sweep", metavar="NAME=VALUES",
        meaning="run the cell once for each value, such as lr=[1e-3,1e-2], as many at once as the pool has room for; "
        "may be given again, for all combinations",
        read=expression, repeatable=True)})
    halt_on_failure: bool = _declared(
        False, "--halt-on-failure", "", "with --sweep: when a run fails, stop the others and raise its error",
        read=switch)
    explain: bool = _declared(
        False, "--explain", "", "show what would be sent, without running", read=switch)
    dry_run: str | None = _declared(
        None, "--dry-run", "[WHEN]", "simulate one rank without GPUs or data: check that the cell works and fits in "
        "GPU memory; with `first`, then run it if so",
        bare="only", choices=("only", "first"), default="run the cell; alone, `only`",
        synonyms=("simulate", "estimate"))
    strategy_options: dict[str, str] = field(default_factory=dict)
    """The given options of the chosen strategy, by `Option.name`."""
    pool_options: dict[str, str] = field(default_factory=dict)
    # fmt: on

    @property
    def size(self) -> GroupSize:
        """The size of the worker group that these options ask for."""
        given = self.gpus or self.ranks
        size = GroupSize(count=given, gpus=not self.ranks, gpu_type=self.gpu_type or "")
        if isinstance(given, NumberRange):
            return replace(size, count=int(given), least=given.least, step=given.step)
        return size

    @property
    def sized(self) -> bool:
        """Return whether the options give ranks or a number of them."""
        return bool(self.gpus or self.ranks or self.on)

    def resized(self, size: GroupSize) -> Options:
        """Return a copy of the options with this size."""
        count = size.count
        if size.least and count:
            count = NumberRange(count, size.least, size.step)
        gpus, ranks = (count, None) if size.gpus else (None, count)
        return replace(self, gpus=gpus, ranks=ranks, gpu_type=size.gpu_type or None)

    def over(self, others: Options) -> Options:
        """Return these options, completed by others where they are not given; a size is taken as a whole."""
        if others == Options():
            return self
        if self.sized:
            others = others.resized(GroupSize())
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name))}
        for name in _MAPPINGS:
            given[name] = {**getattr(others, name), **getattr(self, name)}
        return replace(others, **given)

    def given(self) -> dict[str, object]:
        """Return the options that are set, by their keywords, with the strategy's options, but without `env` and the
        pool's options, which may hold secrets."""
        pairs = zip(_REPORTED, _reported(self), strict=True)
        given = {name: str(value) if isinstance(value, NumberRange) else value for name, value in pairs if value}
        return given | self.strategy_options


OF_CELLS = ("out", "keep", "with_", "explain", "sweep", "halt_on_failure")
"""The options about the names of a cell, which a function has no use for."""
OPTIONS: tuple[Option, ...] = tuple(each.metadata["option"] for each in fields(Options) if each.metadata)
_BY_NAME = {option.name: option for option in OPTIONS}
_REPORTED = tuple(name for name in _BY_NAME if name != "env")
_reported = attrgetter(*_REPORTED)
_MAPPINGS = ("env", "strategy_options", "pool_options")


# ------------------------------------------------------------------------------------------------ in and out


def parse_line(
    line: str, *, strategies: Declared, pools: Declared, strategy: str = DEFAULT_STRATEGY, pool: str = DEFAULT_POOL
) -> Options:
    """Parse the text after `%%distributed`, quoted as in a shell; a `# comment` may end it.

    Args:
        line: The text as typed.
        strategies: The options that each strategy declares, by its name.
        pools: The options that each pool declares, by its name.
        strategy: The strategy whose options can be given without naming it.
        pool: The pool whose options can be given without naming it.

    Raises:
        OptionsError: It says in one sentence which option is wrong, why, and what to do.
    """
    words = split_words(line)
    chosen = value_after(words, "--strategy") or strategy, value_after(words, "--pool") or pool
    table = possible(strategies, pools, *chosen, as_flag)
    arguments = parse_arguments(line, table.options, owners=table.owners)
    for word in arguments.positionals:
        raise OptionsError(f"{word!r} stands alone: {_meant(word, arguments.values, strategies, pools)}")
    return table.chosen(arguments.values)


MODULE = "-m"
"""The word that, in place of a script, announces a module."""


def parse_command(words: Sequence[str], **declared: Any) -> tuple[Options, list[str]]:
    """Parse the words of a command: options, then a script, or `-m` and a module, and its arguments. Return the
    options, and the words from the script or from `-m` on.

    Args:
        words: The words, as a shell splits them.
        declared: The keyword arguments of `parse_line`.

    Raises:
        OptionsError: It says in one sentence which option is wrong, why, and what to do.
    """
    strategy, pool = (
        str(value_after(words, f"--{name}") or declared.get(name, default)) for name, default in _CHOSEN.items()
    )
    table = possible(declared["strategies"], declared["pools"], strategy, pool, as_flag)
    known = {option.flag: option for option in table.options}
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] != MODULE:
        option = known.get(words[end])
        end += 2 if option is not None and takes(option, "".join(words[end + 1 : end + 2])) else 1
    if not any(words[end : end + 1]) or words[end:] == [MODULE]:
        parse_line(shlex.join(words[:end]), **declared)  # an option may have taken the script for its value
        raise OptionsError(
            "there is no script: write its path, or -m and a module, after the options, and its arguments after that"
        )
    return parse_line(shlex.join(words[:end]), **declared), list(words[end:])


# ------------------------------------------------------------------------------------------------ what is possible


@data_class
class Table:
    """The options allowed for the chosen strategy and pool."""

    options: tuple[Option, ...]
    strategy: tuple[Option, ...]
    pool: tuple[Option, ...]
    owners: Owners
    say: Say

    def chosen(self, values: Mapping[str, Any]) -> Options:
        options = Options(
            **{name: value for name, value in values.items() if name in _BY_NAME},
            strategy_options={each.name: values[each.name] for each in self.strategy if each.name in values},
            pool_options={each.name: values[each.name] for each in self.pool if each.name in values},
        )
        _refuse_conflicts(options, lambda name: self.say(_BY_NAME[name], ""))
        return options


def _refuse_conflicts(options: Options, named: Callable[[str], str]) -> None:
    """Raise `OptionsError` for conflicting options; `named` returns an option as the user writes it."""
    if options.gpus and options.ranks:
        raise OptionsError(
            f"{named('gpus')} and {named('ranks')} exclude each other: "
            f"{named('gpus')} has one GPU for each rank, {named('ranks')} has CPU ranks"
        )
    if options.gpu_type and options.ranks:
        raise OptionsError(
            f"{named('gpu_type')} and {named('ranks')} exclude each other: {named('ranks')} has CPU ranks"
        )
    if options.on and options.fresh:
        raise OptionsError(
            f"{named('on')} and {named('fresh')} exclude each other: new processes hold no kept values, leave one out"
        )
    for first, second in (("warm", "fresh"), ("explain", "dry_run")):
        if getattr(options, first) and getattr(options, second):
            raise OptionsError(f"{named(first)} and {named(second)} exclude each other: leave one out")
    if options.min_ranks and not options.max_restarts:
        raise OptionsError(f"{named('min_ranks')} needs {named('max_restarts')}, the maximum number of restarts")
    if options.min_ranks and options.on:
        raise OptionsError(
            f"{named('min_ranks')} and {named('on')} exclude each other: fewer ranks would be numbered differently"
        )
    size = options.gpus or options.ranks
    if isinstance(size, NumberRange):
        given = f"{named('gpus' if options.gpus else 'ranks')} {size}"
        refuse_conflicts_of_range(options, given, size.least, named)
    if options.restart_on and not options.max_restarts:
        raise OptionsError(f"{named('restart_on')} needs {named('max_restarts')}, the maximum number of restarts")
    if size and options.min_ranks and options.min_ranks > size:
        raise OptionsError(f"{named('min_ranks')} {options.min_ranks} is more than the {size} ranks of the cell")
    if size and options.on and options.on[-1] >= size:
        raise OptionsError(f"{named('on')} names rank {options.on[-1]}, but {size} ranks count from 0 to {size - 1}")
    if options.sweep and options.keep:
        raise OptionsError(
            f"{named('sweep')} and {named('keep')} exclude each other: the runs of a sweep leave nothing on the ranks"
        )
    if options.halt_on_failure and not options.sweep:
        raise OptionsError(f"{named('halt_on_failure')} only applies to a sweep: add {named('sweep')}, or leave it out")
    if options.debug and (options.detach or options.sweep):
        other = named("detach" if options.detach else "sweep")
        raise OptionsError(f"{named('debug')} and {other} exclude each other: nobody waits for the run at a prompt")
    if options.out in call_parts.NAMES_OF_RANKS:
        raise OptionsError(
            f"{named('out')} {options.out} would hide the {options.out} that every cell has on its ranks: "
            "choose another name"
        )
    if options.out in options.keep:
        raise OptionsError(f"{named('out')} and {named('keep')} both bind {options.out}: choose another name for one")


def refuse_conflicts_of_range(options: Options, given: str, least: int, named: Callable[[str], str]) -> None:
    """Raise `OptionsError` for options that conflict with a size such as `2:8`.

    Args:
        options: The options of a cell.
        given: The option with the range, as the user writes it.
        least: The minimum number of ranks.
        named: Returns an option as the user writes it.
    """
    if options.min_ranks:
        raise OptionsError(f"{named('min_ranks')} and {given} exclude each other: {least} is the minimum already")
    if options.on:
        raise OptionsError(
            f"{named('on')} and {given} exclude each other: the numbers of the ranks depend on how many there are"
        )
    if options.keep:
        raise OptionsError(f"{named('keep')} and {given} exclude each other: more ranks are new processes, without it")
    if options.sweep:
        raise OptionsError(
            f"{named('sweep')} and {given} exclude each other: its runs share the pool, so give each a fixed number"
        )


def possible(strategies: Declared, pools: Declared, strategy: str, pool: str, say: Say) -> Table:
    """Return the options allowed with this strategy and this pool. Raises `OptionsError` if either name is unknown."""
    everywhere = base(strategies, pools)
    for option in everywhere:  # first, since the other options depend on these two
        if name := {"strategy": strategy, "pool": pool}.get(option.name):
            check_choice(name, option.choices, say(option, name))
    strategy_own = _own(strategies.get(strategy, ()))
    pool_own = _own(pools.get(pool, ()))
    every = (*everywhere, *strategy_own, *pool_own)
    owners = partial(_owners, strategies, pools, say)
    return Table(options=every, strategy=strategy_own, pool=pool_own, owners=owners, say=say)


def _owners(strategies: Declared, pools: Declared, say: Say) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for chooser, declared in ((_BY_NAME["strategy"], strategies), (_BY_NAME["pool"], pools)):
        for owner, options in declared.items():
            for each in options:
                owners.setdefault(each.name, []).append(say(chooser, owner))
    return owners


def base(strategies: Declared, pools: Declared) -> tuple[Option, ...]:
    """Return the options that every cell accepts."""
    known: dict[str, dict[str, Any]] = {
        "strategy": {"choices": tuple(strategies)},
        "pool": {"choices": tuple(pools)},
        "track": {"meaning": _BY_NAME["track"].meaning.format(trackers=", ".join(trackers.names()))},
    }
    return tuple(replace(each, **known[each.name]) if each.name in known else each for each in OPTIONS)


def _own(options: tuple[Option, ...]) -> tuple[Option, ...]:
    def as_text(option: Option) -> Option:
        def read(name: str, text: str) -> str:
            option.read(name, text)
            return text

        return replace(option, read=read, repeatable=False)

    return tuple(as_text(option) for option in options)


def value_after(words: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag anywhere in the line: values never begin with `--`."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith(flag + "="):
            return word.partition("=")[2]
        if word == flag and not following.startswith("--"):
            return following or None
    return None


def _meant(word: str, values: Mapping[str, Any], strategies: Declared, pools: Declared) -> str:
    flag = "--" + word.partition("=")[0]
    if word.isdecimal() and not values.keys() & {"gpus", "ranks"}:
        return f"did you mean --gpus {word}?"
    if flag in {option.flag for option in OPTIONS}:
        return f"did you mean {flag}?"
    for kind, known in (("strategy", strategies), ("pool", pools)):
        if word in known and kind not in values:
            return f"did you mean --{kind} {word}?"
    return "an option begins with --, and a value with spaces needs quotes"
