"""The requests of the line magics, parsed: `%distributed_status`, `_logs`, `_stack`, `_diff`, `_debug`, `_attach`,
`_export`, `_tour`, `_compat`, `_pool`. Kernel side, no state.

logs run-7 --rank 3   --parse_logs-->   LogsRequest(run="run-7", rank=3)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.interfaces import stand_ins
from jupyter_distrib.kernel.settings.cell_options import OPTIONS, GroupSize, Options
from jupyter_distrib.options import (
    Arguments,
    Declared,
    Option,
    any_of,
    check_choice,
    count,
    parse_arguments,
    rank,
    shown,
    split_words,
    switch,
)

PoolAction: TypeAlias = Literal[
    "list", "use", "add", "remove", "start", "stop", "restart", "resize", "up", "down", "trust"
]

JSON = Option(flag="--json", meaning="one line of JSON for each run", read=switch)
RANK = Option(flag="--rank", metavar="R", read=rank, meaning="what this rank wrote", default="all ranks")
LOGS_OPTIONS = (RANK, JSON)
DEBUG_OPTIONS = (
    Option(flag="--done", meaning="make the ranks free what the failure has left in their memory", read=switch),
)
STATUS_OPTIONS = (Option(flag="--doctor", meaning="what is installed and what is missing", read=switch), JSON)
SETUP_OPTIONS = (
    Option(flag="--list", meaning="the set-ups of this notebook", read=switch),
    Option(flag="--undo", metavar="NAME", meaning="new ranks do not run this set-up"),
)
POOL_OPTIONS = tuple(option for option in OPTIONS if option.name in ("gpus", "ranks"))
KIND = Option(flag="--kind", metavar="KIND", meaning="what kind of pool it is")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsRequest:
    run: str | None = None
    """The run's id; None for the last run."""
    rank: int | None = None
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRequest:
    rank: int | None = None
    """The rank; None for the one that failed first."""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    action: PoolAction = "list"
    name: str | None = None
    """The pool's name; None for the pool in use."""
    count: int | None = None
    """The number of ranks in `resize N`; they keep their kind of device."""
    size: GroupSize | None = None
    """The size that `--gpus` or `--ranks` names."""
    kind: str | None = None
    """The kind of the pool, only for `add`."""
    values: dict[str, Any] = field(default_factory=dict)
    """The given options of the kind and defaults for cells, only for `add`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    name: str
    """A name of the notebook, or a run's id."""
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    doctor: bool = False
    json: bool = False


def parse_logs(line: str) -> LogsRequest:
    """Parse `%distributed_logs [RUN] [--rank R] [--json]`."""
    arguments = _few(line, "%distributed_logs [RUN] [--rank R] [--json]", LOGS_OPTIONS, 1)
    return LogsRequest(run=next(iter(arguments.positionals), None), **arguments.values)


def parse_stack(line: str) -> str | None:
    """Parse `%distributed_stack [RUN]`; return the run's id, or None for the last run."""
    return next(iter(_few(line, "%distributed_stack [RUN]", (), 1).positionals), None)


def parse_diff(line: str) -> str:
    """Parse `%distributed_diff NAME`; return an empty string without a name."""
    return next(iter(_few(line, "%distributed_diff NAME", (), 1).positionals), "")


def parse_tour(line: str) -> None:
    """Parse `%distributed_tour`, which has no arguments."""
    _few(line, "%distributed_tour", (), 0)


def parse_debug(line: str) -> DebugRequest:
    """Parse `%distributed_debug [RANK | --done]`."""
    arguments = _few(line, "%distributed_debug [RANK | --done]", DEBUG_OPTIONS, 1)
    number = next(iter(arguments.positionals), None)
    return DebugRequest(rank=None if number is None else rank("%distributed_debug", number), **arguments.values)


def parse_setup(line: str) -> str | None:
    """Parse `%distributed_setup [--list | --undo NAME]`; return the set-up to remove, or None to list them."""
    usage = "%distributed_setup [--list | --undo NAME]"
    values = _few(line, usage, SETUP_OPTIONS, 0).values
    if len(values) > 1:
        raise OptionsError(f"--list and --undo are two requests: the line is {usage}")
    return values.get("undo")


def parse_setup_name(line: str) -> str:
    """Parse the line of a cell, `%%distributed_setup [NAME]`; without a name, return an empty string."""
    return next(iter(_few(line, "%%distributed_setup [NAME]", (), 1).positionals), "")


def parse_export(line: str) -> ExportRequest:
    """Parse `%distributed_export NAME train.py`."""
    usage = "%distributed_export NAME SCRIPT.py"
    names = _few(line, usage, (), 2).positionals
    if len(names) < 2:
        raise OptionsError(f"{usage} needs the name of a Results or Run, or a run's id, and the script to write")
    return ExportRequest(name=names[0], path=names[1])


def parse_attach(line: str) -> str | None:
    """Parse `%distributed_attach [RUN]`; return the run's id, or None for the newest detached run."""
    return next(iter(_few(line, "%distributed_attach [RUN]", (), 1).positionals), None)


def parse_compat(line: str) -> tuple[str, ...]:
    """Parse `%distributed_compat PLATFORM...`."""
    platforms = split_words(line)
    for each in platforms:
        check_choice(each, stand_ins.PLATFORMS, f"%distributed_compat {each}")
    if not platforms:
        raise OptionsError(f"%distributed_compat needs the name of a platform: choose {any_of(stand_ins.PLATFORMS)}")
    return tuple(platforms)


def parse_status(line: str) -> StatusRequest:
    """Parse `%distributed_status [--doctor | --json]`."""
    request = StatusRequest(**_few(line, "%distributed_status [--doctor | --json]", STATUS_OPTIONS, 0).values)
    if request.doctor and request.json:
        raise OptionsError("--doctor and --json exclude each other: leave one out")
    return request


def parse_pool(line: str, *, pools: Collection[str], of_kinds: Declared = MappingProxyType({})) -> PoolRequest:
    """Parse `%distributed_pool [ACTION] [NAME or N] [--gpus N|--ranks N]`.

    Args:
        line: The text as typed.
        pools: The names of all pools.
        of_kinds: The options that `add` takes, by kind.
    """
    actions = get_args(PoolAction)
    if split_words(line)[:1] == ["add"]:
        return _parse_add(line, of_kinds)
    usage = f"%distributed_pool {'|'.join(actions)} [NAME or N] [--gpus N | --ranks N]"
    arguments = _few(line, usage, POOL_OPTIONS, 2)
    action, operand = (*arguments.positionals, None, None)[:2]
    check_choice(action or "list", actions, f"%distributed_pool {action}")
    request = PoolRequest(
        action=cast(PoolAction, action or "list"),
        name=operand if action != "resize" else None,
        count=count("resize", operand) if operand and action == "resize" else None,
        size=Options(**arguments.values).size if arguments.values else None,
    )
    given = len(arguments.values) + (request.count is not None)
    _check_pool_request(request, given, pools)
    return request


def _parse_add(line: str, of_kinds: Declared) -> PoolRequest:
    """Parse `add NAME --kind KIND [OPTION]...`."""
    words = split_words(line)
    flags = [word for word in words if word == "--kind" or word.startswith("--kind=")]
    at = words.index(flags[0]) if flags else -1
    kind = (flags[0].partition("=")[2] or "".join(words[at + 1 : at + 2])) if flags else ""
    if not kind:
        raise OptionsError(f"add needs the kind of the pool: write add NAME --kind {'|'.join(of_kinds)}")
    check_choice(kind, of_kinds, f"--kind {kind}")
    owners: dict[str, list[str]] = {}
    for owner, options in of_kinds.items():
        for option in options:
            owners.setdefault(option.name, []).append(f"--kind {owner}")
    arguments = parse_arguments(line, (KIND, *of_kinds[kind]), owners=lambda: owners)
    _, *names = arguments.positionals
    if len(names) != 1:
        raise OptionsError(f"add takes one name for the pool; got {shown(' '.join(names)) if names else 'none'}")
    values = {name: value for name, value in arguments.values.items() if name != KIND.name}
    return PoolRequest(action="add", name=names[0], kind=kind, values=values)


def _check_pool_request(request: PoolRequest, sizes: int, pools: Collection[str]) -> None:
    """Raise `OptionsError` for a request that makes no sense; `sizes` is the number of sizes in it."""
    action, name = request.action, request.name
    if action in ("start", "resize"):
        if sizes > 1 or (action == "resize" and not sizes):
            number = "N, --gpus N or --ranks N" if action == "resize" else "--gpus N or --ranks N"
            raise OptionsError(f"{action} takes one of {number}; got {sizes or 'none'} of them")
    elif sizes:
        raise OptionsError(f"{action} takes no --gpus or --ranks: only start and resize do")
    if action in ("use", "remove") and not name:
        raise OptionsError(f"{action} needs the name of a pool: choose {any_of(pools)}")
    if action == "list" and name:
        raise OptionsError(f"list takes no name: leave {name!r} out")
    if name and name.isdecimal():
        meant = f"start --gpus {name}" if action == "start" else f"resize {name}"
        raise OptionsError(f"{action} takes the name of a pool, not {name}: did you mean {meant}?")
    if name:
        check_choice(name, pools, f"pool {name}")


def _few(line: str, usage: str, options: Sequence[Option], most: int) -> Arguments:
    arguments = parse_arguments(line, options)
    if extra := arguments.positionals[most:]:
        raise OptionsError(f"{extra[0]!r} is one word too many: the line is {usage}")
    return arguments
