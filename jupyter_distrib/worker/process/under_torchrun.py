"""Runs an exported cell under torchrun, with the names and the strategy that it had on ranks of this package. In the
main thread of a process that torchrun has started, which becomes a rank for the rest of its life.

    from jupyter_distrib.worker.process import under_torchrun

    under_torchrun.run(__file__, strategy="ddp")
    ... # the cell follows
"""

from __future__ import annotations

import os
import sys
import threading
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from jupyter_distrib import runtime
from jupyter_distrib.cells import cell
from jupyter_distrib.interfaces import framework, identity
from jupyter_distrib.interfaces import strategy as strategy_module
from jupyter_distrib.system import process
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import rank_environment

MARK = "under_torchrun.run("


def run(path: str, *, strategy: str, options: Mapping[str, str] | None = None) -> NoReturn:
    """Run the code below this call in the script, as a cell under a strategy, and exit.

    Args:
        path: The script: `__file__`.
        strategy: The strategy's name.
        options: The strategy's own options, by their keywords.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(f"{path} is run by torchrun: torchrun --nproc-per-node N {Path(path).name}")
    framework.load()
    assert framework.current is not None
    order = _order()
    identity.assume(order)
    framework.current.set_up(order)
    groups = framework.current.groups
    groups.reset(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), -1)
    groups.begin(order.group)
    names = vars(sys.modules["__main__"])
    for name, value in rank_environment.provided(names).items():
        names.setdefault(name, value)
    chosen = identity.cell.strategy = strategy_module.load(strategy)()
    ok = False
    try:
        chosen.begin(_strategy_run(path, options or {}, names))
        value = cell.execute(m.Cell(source=_rest(path), filename=path), names, chosen.adapted)
        chosen.returning(value)
        ok = True
    finally:
        chosen.end(ok=ok)
    torch = sys.modules["torch"]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - Python's own wait for the script's threads
    # Otherwise Python would free models and groups while threads of torch use them, and torch would abort.
    process.leave()


def _order() -> m.WorkerOrder:
    import torch

    local = runtime.get_local_rank()
    gpus = torch.cuda.is_available()
    return m.WorkerOrder(
        group=os.environ["TORCHELASTIC_RUN_ID"],
        worker="",
        agent_pid=os.getppid(),
        rank=runtime.get_global_rank(),
        world_size=runtime.get_world_size(),
        local_rank=local,
        local_world_size=runtime.get_local_world_size(),
        node_rank=runtime.get_node_rank(),
        device=f"cuda:{local}" if gpus else "cpu",
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", "all") if gpus else None,
        threads=torch.get_num_threads(),
    )


def _strategy_run(path: str, options: Mapping[str, str], names: dict[str, object]) -> strategy_module.StrategyRun:
    assert framework.current is not None
    first = runtime.get_global_rank() == 0
    return strategy_module.StrategyRun(
        options=options,
        filename=path,
        everyone=True,
        names=names,
        exchange=framework.current.groups.exchange,
        note=lambda text: print(f"· {text}", file=sys.stderr) if first else None,
    )


def _rest(path: str) -> str:
    """Return the script with empty lines up to the call of `run`, which keeps the line numbers."""
    with tokenize.open(path) as file:
        lines = file.read().splitlines(keepends=True)
    begin = next(number for number, line in enumerate(lines, 1) if line.startswith(MARK))
    return "\n" * begin + "".join(lines[begin:])
