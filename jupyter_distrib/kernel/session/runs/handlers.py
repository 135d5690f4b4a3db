"""Tells whether code of the notebook may catch what is raised here. Kernel side; any thread."""

from __future__ import annotations

import inspect

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
        if code.co_exceptiontable and not is_ours:
            return True
        frame = frame.f_back
    return True
