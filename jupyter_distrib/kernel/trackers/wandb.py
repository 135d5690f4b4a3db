"""The tracker of Weights & Biases: one W&B run for each run, in the group of the one that is active in the notebook.

Without an API key, or with `WANDB_MODE=offline`, it writes the files that `wandb sync` uploads. Runs that the ranks
begin themselves join the group. `follow` runs in the cell's thread, the rest in the observer's.
"""

from __future__ import annotations

import netrc
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from jupyter_distrib.addresses import shown
from jupyter_distrib.kernel.analysis import run_facts
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.libraries.wandb import GROUP_VARIABLE
from jupyter_distrib.system import git_folder
from jupyter_distrib.system.interrupts import WholeImports
from jupyter_distrib.wire import messages as m

library = "wandb"


def follow(run: ObservedRun) -> WandbObserver | None:
    """Return an observer if the run is to be tracked, or if a W&B run is active in the notebook; None for an attached
    run, which the kernel that began it has logged."""
    if run.attached:
        return None
    active = getattr(sys.modules.get("wandb"), "run", None)
    if active is None and "wandb" not in run.trackers:
        return None
    with WholeImports():
        import wandb
    return WandbObserver(run, wandb, active)


class WandbObserver(Observer):
    """The writer of one W&B run."""

    ends_in_background = True

    def __init__(self, run: ObservedRun, wandb: Any, active: Any) -> None:
        self._run, self._wandb, self._active = run, wandb, active
        self._group = (active.group or active.id) if active is not None else run.id
        self._writer: Any = None
        self._series = run_facts.Series(run)

    def begin(self) -> Mapping[str, str]:
        # The id is made here, so that the cell need not wait for a server.
        self._id = secrets.token_hex(4)
        self._mode = os.environ.get("WANDB_MODE") or ("online" if self._has_key() else "offline")
        if self._mode == "offline":
            self._run.note(f"W&B: run {self._id}, offline; `wandb sync wandb/offline-run-*-{self._id}` uploads it")
        return {"WANDB_RUN_GROUP": self._group, GROUP_VARIABLE: self._group}

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if self._writer is None:
            self._writer = self._opened()
        for name, (value, step) in self._series.points(event).items():
            self._writer.log({name: value, "step": step})
        if isinstance(event, m.Ended):
            state = run_facts.end_state(record)
            self._writer.summary["state"] = state
            self._writer.finish(exit_code=0 if state == "FINISHED" else 1)

    def _has_key(self) -> bool:
        host = urlsplit(self._wandb.Settings().base_url).hostname or ""
        with suppress(OSError, netrc.NetrcParseError):
            return "WANDB_API_KEY" in os.environ or netrc.netrc().authenticators(host) is not None
        return False

    def _opened(self) -> Any:
        settings = self._wandb.Settings(console="off", silent=True, x_disable_stats=True, save_code=False)
        writer = self._wandb.init(
            id=self._id,
            project=self._active.project if self._active is not None else None,
            name=self._run.label,
            group=self._group,
            job_type="distributed",
            mode=self._mode,
            reinit="create_new",
            config={
                **run_facts.parameters(self._run),
                **run_facts.arguments(self._run),
                "git": git_folder.state("."),
                "cell": self._run.source,
            },
            settings=settings,
        )
        if writer.url:
            self._run.note(f"W&B: {shown(writer.url)}")
        return writer
