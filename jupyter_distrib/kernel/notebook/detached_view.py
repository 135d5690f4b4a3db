"""Shows a run that its cell does not wait for: a thread follows it. Runs in the kernel's main thread."""

from __future__ import annotations

import threading

from jupyter_distrib.kernel.notebook.live_view import LiveView
from jupyter_distrib.kernel.session.runs.run import Run


def show(run: Run) -> None:
    """Show the run from a thread of its own, so that the cell ends as soon as the ranks have it or it is queued."""
    try:
        run.start.wait()
    except KeyboardInterrupt:
        run.cancel()
        raise
    view = LiveView(run).open_now()

    def follow() -> None:
        try:
            run.wait(view)
        except BaseException:  # noqa: BLE001 - `result()` raises it
            return

    threading.Thread(target=follow, name=f"jupyter_distrib-{run.id}", daemon=True).start()
