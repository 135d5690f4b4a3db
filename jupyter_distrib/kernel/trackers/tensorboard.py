"""The tracker of TensorBoard: one event file for each run, in `runs/` beside the notebook. Needs the package
`tensorboard` and no torch; runs in the observer's thread."""

from __future__ import annotations

import glob
import time
from collections.abc import Mapping
from typing import Any

from jupyter_distrib.kernel.analysis import run_facts
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system.interrupts import WholeImports
from jupyter_distrib.wire import messages as m

library = "tensorboard"
FOLDER = "runs"
FLUSH_S = 2
"""Seconds after which written data are in the file, for a TensorBoard that is open."""


def follow(run: ObservedRun) -> TensorBoardObserver | None:
    """Return an observer if the run is to be tracked."""
    if "tensorboard" not in run.trackers:
        return None
    with WholeImports():
        from tensorboard.summary.writer import event_file_writer
    began = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(run.began_at_s))
    there = glob.glob(f"{FOLDER}/*_{glob.escape(run.id)}") if run.attached else []
    return TensorBoardObserver(run, event_file_writer, there[0] if there else f"{FOLDER}/{began}_{run.id}")


class TensorBoardObserver(Observer):
    """The writer of one event file."""

    def __init__(self, run: ObservedRun, module: Any, folder: str) -> None:
        self._run, self._module, self._folder = run, module, folder
        self._series = run_facts.Series(run)

    def begin(self) -> Mapping[str, str]:
        self._writer = self._module.EventFileWriter(self._folder, flush_secs=FLUSH_S)
        if self._run.attached:
            self._replace_what_is_there()
        self._run.note(f"TensorBoard: %tensorboard --logdir {FOLDER} (this run is in {self._folder})")
        rows = "\n".join(f"| {name} | {value} |" for name, value in run_facts.parameters(self._run).items())
        self._write_text("run/parameters", f"| parameter | value |\n|---|---|\n{rows}")
        self._write_text("run/cell", "\n".join(f"    {line}" for line in self._run.source.strip("\n").splitlines()))
        return {}

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, (value, step) in self._series.points(event).items():
            self._write(Summary(value=[Summary.Value(tag=name, simple_value=value)]), step)
        if isinstance(event, m.Ended):
            self._write_text("run/state", run_facts.end_state(record))
            self._writer.close()

    def _replace_what_is_there(self) -> None:
        """Make TensorBoard forget the points in another kernel's files, since all are written again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=start))

    def _write(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _write_text(self, name: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        as_text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        self._write(Summary(value=[Summary.Value(tag=name, metadata=as_text, tensor=tensor)]), 0)
