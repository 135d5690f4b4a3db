"""The stand-in for `sparkdl`: `HorovodRunner` and `log_to_driver` over our pools, without Spark.

Kernel side, except for `log_to_driver`, which ranks call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from jupyter_distrib.compat import launching, on_ranks
from jupyter_distrib.compat.driver_lines import MARK, log_to_driver
from jupyter_distrib.kernel.notebook.live_view import LiveView
from jupyter_distrib.kernel.record.observer import Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs.run import Run, View
from jupyter_distrib.wire import messages as m

__all__ = ["HorovodRunner", "log_to_driver"]


class HorovodRunner:
    """Runs a function on several ranks.

    Args:
        np: The number of ranks: above 0 on the pool in use, below 0 on this machine, 0 for as many as the pool has.
        driver_log_verbosity: `all` shows the run and all its output, `log_callback_only` only the messages given to
            `log_to_driver`.

    Raises:
        ValueError: A value is not one of these.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if isinstance(np, bool) or not isinstance(np, int):
            raise ValueError(f"np must be a whole number; got {np!r}")
        if driver_log_verbosity not in ("all", "log_callback_only"):
            raise ValueError(f"driver_log_verbosity must be all or log_callback_only; got {driver_log_verbosity!r}")
        self.num_processor, self.driver_log_verbosity = np, driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run the function with these keyword arguments and return rank 0's value.

        Raises:
            RuntimeError: It failed on a rank; the rank's own exception is the cause.
        """
        np = self.num_processor
        options: dict[str, Any] = launching.pool_of(local=np < 0)
        if np:
            options["gpus"] = abs(np)
        given = main, (), kwargs
        view: Callable[[Run], View] = LiveView if self.driver_log_verbosity == "all" else DriverLines
        return launching.launch("HorovodRunner", on_ranks.with_variables, given, {}, view, subject=main, **options)[0]


class DriverLines(Observer):
    """A view of a run that shows the messages of `log_to_driver` only; drawn in the thread that waits."""

    def __init__(self, run: Run) -> None:
        self._news = threading.Event()
        self._entry = 0

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if isinstance(event, m.Ended) or record.entry_count != self._entry:
            self._news.set()

    def wait_for_news(self) -> None:
        self._news.wait(0.2)
        self._news.clear()

    def draw(self, record: RunRecord, elapsed_s: float) -> None:
        lines, self._entry = record.lines_since(self._entry), record.entry_count
        for line in lines:
            if line.text.startswith(MARK):
                print(line.text.removeprefix(MARK))
        sys.stdout.flush()
