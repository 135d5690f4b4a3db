"""Refuses options of a cell that exclude or need one another. In the kernel; no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jupyter_distrib.errors import OptionsError

if TYPE_CHECKING:
    from jupyter_distrib.kernel.settings.cell_options import Options


def refuse(options: Options, named: Callable[[str], str]) -> None:
    """Raise `OptionsError` for options that make no sense together; `named` returns an option as the user writes it."""
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
    if options.min_ranks and not options.max_restarts:
        raise OptionsError(f"{named('min_ranks')} needs {named('max_restarts')}, the number of restarts at most")
    if options.min_ranks and options.on:
        raise OptionsError(
            f"{named('min_ranks')} and {named('on')} exclude each other: fewer ranks are others, with other numbers"
        )
    if options.restart_on and not options.max_restarts:
        raise OptionsError(f"{named('restart_on')} needs {named('max_restarts')}, the number of restarts at most")
    size = options.gpus or options.ranks
    if size and options.min_ranks and options.min_ranks > size:
        raise OptionsError(f"{named('min_ranks')} {options.min_ranks} is more than the {size} ranks of the cell")
    if size and options.on and options.on[-1] >= size:
        raise OptionsError(f"{named('on')} names rank {options.on[-1]}, but {size} ranks count from 0 to {size - 1}")
    if options.sweep and options.keep:
        raise OptionsError(
            f"{named('sweep')} and {named('keep')} exclude each other: the runs of a sweep leave nothing on the ranks"
        )
    if options.halt_on_failure and not options.sweep:
        raise OptionsError(f"{named('halt_on_failure')} is about a sweep: add {named('sweep')}, or leave it out")
    if options.debug and (options.detach or options.sweep):
        other = named("detach" if options.detach else "sweep")
        raise OptionsError(f"{named('debug')} and {other} exclude each other: nobody waits for the run at a prompt")
    if options.out in options.keep:
        raise OptionsError(f"{named('out')} and {named('keep')} both bind {options.out}: choose another name for one")
