"""`%%distributed_setup`: runs a cell in the notebook, and has every rank run it before its first cell. Kernel's main
thread; loaded when the magic is used."""

from __future__ import annotations

import inspect
import re
import types
from dataclasses import replace
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from jupyter_distrib.cells import cell as cell_module
from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.analysis.traceback_text import Rendering
from jupyter_distrib.kernel.capture import inputs
from jupyter_distrib.kernel.capture.capture import Captured
from jupyter_distrib.kernel.notebook import magic_requests
from jupyter_distrib.kernel.notebook.status import SetupTable
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.session.setups import in_message
from jupyter_distrib.kernel.sidebar import cell_outputs
from jupyter_distrib.system import interrupts

_NAME = re.compile(r"[\w.-]+")


def change(session: Session, line: str) -> SetupTable | None:
    """List the set-ups, or remove one."""
    name = magic_requests.parse_setup(line)
    if name is None:
        return SetupTable.of(session)
    session.setups.remove(name)
    print(
        f"New ranks do not run the set-up {name}. Ranks that have run it stay as it left them; if "
        "that matters, replace them: --fresh."
    )
    return None


def run(session: Session, shell: InteractiveShell, line: str, captured: Captured) -> Any:
    """Run the cell in the notebook, then have ranks run it. Return the value of its last expression.

    Raises:
        OptionsError, CaptureError, PayloadError: Nothing was run.
        BaseException: What the cell raised in the notebook; the set-ups are as they were.
    """
    given = magic_requests.parse_setup_name(line)
    if given and not _NAME.fullmatch(given):
        raise OptionsError(f"{given!r} cannot be the name of a set-up: use letters, digits, `_`, `-` and `.`")
    cell_id = cell_outputs.cell_id(shell)
    name = session.setups.name_for(given, cell_id, captured.cell.source)
    with interrupts.WholeImports():
        packed = inputs.pack(captured.inputs, shell.user_ns)
    in_message(packed)
    value = _run_here(shell, captured)
    session.setups.register(name, captured, packed, shell.user_ns, cell_id)
    return value


def _run_here(shell: InteractiveShell, captured: Captured) -> Any:
    """Run the cell in the notebook. An exception shows the frames of a plain cell."""
    filename = _file_of_cell(shell) or shell.compile.cache(captured.cell.source, shell.execution_count)
    try:
        cell = replace(captured.cell, filename=filename)
        cell_module.add_sources(cell)
        return cell_module.execute(cell, shell.user_ns)
    except Exception as error:
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != filename:
            own = own.tb_next
        _show_only(shell, error, own)
        raise


def _show_only(shell: InteractiveShell, error: Exception, traceback: types.TracebackType | None) -> None:
    lines = shell.InteractiveTB.structured_traceback(type(error), error, traceback)
    error.__dict__["_render_traceback_"] = Rendering(lines=tuple(lines))


def _file_of_cell(shell: InteractiveShell) -> str:
    """Return the file name under which the running cell was compiled; empty outside a cell."""
    frame = inspect.currentframe()
    while frame is not None:
        if shell.compile.format_code_name(frame.f_code.co_filename) is not None:
            return frame.f_code.co_filename
        frame = frame.f_back
    return ""
