"""Every error of this package.

    DistributedError          shown in a notebook as its message alone, without our frames
    ├ OptionsError            the magic line or a keyword is wrong; names the near one
    ├ CaptureError            the cell cannot run elsewhere as it stands; names the line
    ├ PayloadError            a variable cannot travel; names it and the part of it that cannot
    ├ PoolError               ranks could not be had; says what is missing or who holds it
    ├ RankLost                a rank's process died: signal or exit code, last lines
    ├ RemoteError             stands for a rank's exception whose own class cannot come back
    ├ RunTimeout              the run took longer than `--timeout`; says where each rank was
    └ ValueLost               a kept value is gone with the process that held it

A cell that raises on a rank raises the user's own exception type, not one of these. Standard library only; no clock, no
thread. Instances survive pickling, because every class takes its message alone.
"""

from __future__ import annotations


class DistributedError(Exception):
    """Base of all errors that this package raises on its own account."""

    def _render_traceback_(self) -> list[str]:
        """Tell IPython (>= 7) what to show instead of a traceback through our code."""
        return f"{type(self).__name__}: {self}".splitlines()


class OptionsError(DistributedError, ValueError):
    """An option is unknown, misspelt, or has a value that makes no sense."""


class CaptureError(DistributedError):
    """The cell needs something that cannot be given to it on a rank."""


class PayloadError(DistributedError):
    """A captured variable cannot be pickled."""


class PoolError(DistributedError):
    """The ranks asked for cannot be had."""


class RankLost(DistributedError):
    """A rank's process ended in the middle of a run."""


class RemoteError(DistributedError):
    """A rank's exception, when the object itself could not be brought back."""


class RunTimeout(DistributedError, TimeoutError):
    """The run took longer than it was given."""


class ValueLost(DistributedError, LookupError):
    """A value kept on a rank is gone."""
