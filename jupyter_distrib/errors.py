"""The errors of this package, and the addresses of the documentation's pages that explain them.

    DistributedError          shown in a notebook as its message alone, without our frames
    ├ OptionsError            the magic line or a keyword is wrong; names a similar one
    ├ CaptureError            the cell cannot run on ranks unchanged; names the line
    ├ PayloadError            a variable cannot be sent; names it and the part that cannot
    ├ PoolError               ranks could not be started or used; says what is missing or who holds it
    ├ RankLost                a rank's process died: signal or exit code, last lines
    ├ RemoteError             replaces a rank's exception whose own class cannot come back
    ├ RunTimeout              the run took longer than `--timeout`; says where each rank was
    └ ValueLost               a kept value was lost with the process that held it

A cell that raises on a rank raises the user's own exception type, not one of these. Standard library only; no clock, no
thread. Instances can be pickled, because every class takes only its message.
"""

from __future__ import annotations

from typing import ClassVar

from jupyter_distrib.addresses import without_secrets

SITE = "https://jupyter-distrib.readthedocs.io/en/latest/"


def page(name: str, section: str = "") -> str:
    """Return the address of a page of docs/.

    Args:
        name: The file's name without `.md`.
        section: The anchor of a heading in it: `poolerror`.
    """
    return f"{SITE}{name}.html" + (f"#{section}" if section else "")


class DistributedError(Exception):
    """The base of all errors that this package raises on its own account."""

    shows_addresses: ClassVar = False
    """Whether its message may contain addresses of services, from which secrets are removed."""

    def __init__(self, *message: object) -> None:
        super().__init__(*((without_secrets(str(each)) for each in message) if self.shows_addresses else message))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython (>= 7) shows instead of a traceback through our code."""
        return [*f"{type(self).__name__}: {self}".splitlines(), f"More: {self.page}"]

    @property
    def page(self) -> str:
        """Address of the documentation's section on this error."""
        public = next(each for each in type(self).__mro__ if globals().get(each.__name__) is each)
        return page("errors", public.__name__.lower() if public is not DistributedError else "")


class OptionsError(DistributedError, ValueError):
    """An error for an option that is unknown, misspelt, or has a value that makes no sense."""

    shows_addresses = True


class CaptureError(DistributedError):
    """An error for a cell that needs something which ranks cannot give it."""


class PayloadError(DistributedError):
    """An error for a captured variable that cannot be pickled."""


class PoolError(DistributedError):
    """An error for requested ranks that cannot be started or used."""

    shows_addresses = True


class RankLost(DistributedError):
    """An error for a rank's process that ended in the middle of a run."""


class RemoteError(DistributedError):
    """A stand-in for a rank's exception whose object could not be brought back."""


class RunTimeout(DistributedError, TimeoutError):
    """An error for a run that took longer than its time limit."""


class ValueLost(DistributedError, LookupError):
    """An error for a value kept on a rank that was lost."""
