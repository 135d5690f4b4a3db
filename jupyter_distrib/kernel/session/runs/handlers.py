"""Tells whether code of the notebook may catch what is raised here. Kernel side; any thread."""

from __future__ import annotations

import dis
import inspect
from functools import lru_cache
from types import CodeType

from jupyter_distrib.system import file_owner

_IPYTHON = "IPython."
_EXECUTES = "IPython.core.interactiveshell", "run_code"
"""The module and the function of IPython that execute a statement of a cell, and show what it raises."""


def may_catch() -> bool:
    """Return whether an exception meets code that may catch it before IPython shows it: a `try` or a `with` of a cell
    or a library, or no IPython at all."""
    frame = inspect.currentframe()
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if (module, code.co_name) == _EXECUTES:
            return False
        is_ours = module.startswith(_IPYTHON) or file_owner.is_own(code.co_filename)
        if not is_ours and any(frame.f_lasti in covered for covered in _handled(code)):
            return True
        frame = frame.f_back
    return True


@lru_cache(maxsize=256)
def _handled(code: CodeType) -> tuple[range, ...]:
    """Return the instructions covered by a `try` or `with`, whose handler begins with PUSH_EXC_INFO. Python (3.12) adds
    handlers without it to coroutines, generators and comprehensions. Relies on `dis._parse_exception_table`."""
    entries = getattr(dis, "_parse_exception_table", lambda code: ())(code)
    handler = dis.opmap["PUSH_EXC_INFO"]
    return tuple(range(each.start, each.end) for each in entries if code.co_code[each.target] == handler)
