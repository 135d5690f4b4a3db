"""The number of threads that a library uses in a rank for one operation: a share of the cores, or the user's number.

Torch's number can be set at any time (`PyTorch.use_threads`). The BLAS of numpy reads the environment when it is
loaded, which is long before a rank is forked, and would use all cores in each rank: with twice as many threads as cores
it is 5 times slower, with eight times as many 90 times (measured with numpy 2.4 and OpenBLAS 0.3.31: two processes that
multiply matrices of 300 x 300).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from jupyter_distrib.interfaces import framework

ALL = "OMP_NUM_THREADS"
_OPENBLAS = "OPENBLAS_NUM_THREADS"
_found: list[Any] = []
"""The BLAS libraries except torch's own: `threadpoolctl.LibController`."""


@contextmanager
def loading() -> Iterator[None]:
    """Limit a BLAS that is loaded inside the block to one thread, until `use`.

    If threadpoolctl is missing, as it may be on a node of a cluster or under an interpreter of the user, the limit
    stays for good.
    """
    before = os.environ.get(_OPENBLAS)
    os.environ[_OPENBLAS] = "1"
    try:
        yield
    finally:
        del os.environ[_OPENBLAS]
        if before is not None:
            os.environ[_OPENBLAS] = before
    with suppress(ImportError):
        from threadpoolctl import ThreadpoolController

        _found[:] = [each for each in ThreadpoolController().lib_controllers if each.user_api == "blas"]


def use(count: int, given: Mapping[str, str]) -> None:
    """Use this many threads from now on, or the number that the given variables set."""
    count = _number(given.get(ALL)) or count
    if framework.current is not None:
        framework.current.use_threads(count)
    for library in _found:
        wanted = _number(given.get(f"{library.internal_api.upper()}_NUM_THREADS")) or count
        if library.num_threads != wanted:
            library.set_num_threads(wanted)


def _number(text: str | None) -> int:
    """Parse a number; 0 for a text that is not a number."""
    return int(text) if text is not None and text.isdigit() else 0
