"""What the line magics ask for: `%distributed_status`, `_logs`, `_attach` and `_pool`. Kernel side, no state.

logs run-7 --rank 3   --parse_logs-->   LogsRequest(run="run-7", rank=3)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from jupyter_distrib.arguments import Arguments, Option, any_of, check_choice, count, parse_arguments, rank
from jupyter_distrib.errors import OptionsError
from jupyter_distrib.options import OPTIONS

PoolAction: TypeAlias = Literal["list", "use", "start", "stop", "restart", "resize"]

LOGS_OPTIONS = (Option(flag="--rank", metavar="R", read=rank, meaning="what this rank wrote", default="all ranks"),)
POOL_OPTIONS = tuple(option for option in OPTIONS if option.name in ("gpus", "ranks"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsRequest:
    run: str | None = None
    """None: the last run."""
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    action: PoolAction = "list"
    name: str | None = None
    """None: the pool in use."""
    size: int | None = None
    """`resize N`: so many ranks, of the kind that they are now."""
    gpus: int | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    run: str | None = None
    """None: the newest detached run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    pass


def parse_logs(line: str) -> LogsRequest:
    """`%distributed_logs [RUN] [--rank R]`."""
    arguments = _few(line, "%distributed_logs [RUN] [--rank R]", LOGS_OPTIONS, 1)
    return LogsRequest(run=next(iter(arguments.positionals), None), **arguments.values)


def parse_attach(line: str) -> AttachRequest:
    """`%distributed_attach [RUN]`."""
    return AttachRequest(run=next(iter(_few(line, "%distributed_attach [RUN]", (), 1).positionals), None))


def parse_status(line: str) -> StatusRequest:
    """`%distributed_status`."""
    _few(line, "%distributed_status", (), 0)
    return StatusRequest()


def parse_pool(line: str, *, pools: Collection[str]) -> PoolRequest:
    """`%distributed_pool list|use|start|stop|restart|resize [NAME or N] [--gpus N|--ranks N]`."""
    actions = get_args(PoolAction)
    usage = f"%distributed_pool {'|'.join(actions)} [NAME or N] [--gpus N | --ranks N]"
    arguments = _few(line, usage, POOL_OPTIONS, 2)
    action, operand = (*arguments.positionals, None, None)[:2]
    check_choice(action or "list", actions, f"%distributed_pool {action}")
    request = PoolRequest(
        action=cast(PoolAction, action or "list"),
        name=operand if action != "resize" else None,
        size=count("resize", operand) if operand and action == "resize" else None,
        **arguments.values,
    )
    _refuse_pool_nonsense(request, pools)
    return request


def _refuse_pool_nonsense(request: PoolRequest, pools: Collection[str]) -> None:
    action, name = request.action, request.name
    sizes = [size for size in (request.size, request.gpus, request.ranks) if size]
    if action in ("start", "resize"):
        if len(sizes) > 1 or (action == "resize" and not sizes):
            number = "N, --gpus N or --ranks N" if action == "resize" else "--gpus N or --ranks N"
            raise OptionsError(f"{action} wants one of {number}; got {len(sizes) or 'none'} of them")
    elif sizes:
        raise OptionsError(f"{action} takes no --gpus or --ranks: only start and resize do")
    if action == "use" and not name:
        raise OptionsError(f"use needs the name of a pool: choose {any_of(pools)}")
    if action == "list" and name:
        raise OptionsError(f"list takes no name: leave {name!r} out")
    if name and name.isdecimal():
        meant = f"start --gpus {name}" if action == "start" else f"resize {name}"
        raise OptionsError(f"{action} wants the name of a pool, not {name}: did you mean {meant}?")
    if name:
        check_choice(name, pools, f"pool {name}")


def _few(line: str, usage: str, options: Sequence[Option], most: int) -> Arguments:
    arguments = parse_arguments(line, options)
    if extra := arguments.positionals[most:]:
        raise OptionsError(f"{extra[0]!r} is one word too many: the line is {usage}")
    return arguments
