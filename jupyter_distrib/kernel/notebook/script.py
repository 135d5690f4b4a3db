"""Scripts on ranks, as torchrun runs them: `%distributed_run train.py`, `run_script` and `jupyter distrib run`.

The script is the cell: its text travels, is `__main__` on each rank, and finds its arguments in `sys.argv` and its
folder first on the path, which other nodes are given a copy of. A module (`-m package.train`) is looked for on the
ranks, and the folder of the notebook is first on the path. In the thread that executes the cell.
"""

from __future__ import annotations

import os
import tokenize
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from jupyter_distrib.addresses import line_without_secrets
from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.notebook import launcher_lines
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.cell_order import CellRequest
from jupyter_distrib.kernel.session.runs.interrupt_presses import early_interrupt
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.cell_options import MODULE, OF_CELLS, Options
from jupyter_distrib.kernel.settings.keywords import from_keywords, with_options
from jupyter_distrib.kernel.settings.option_keywords import OptionKeywords
from jupyter_distrib.serialization import payload
from jupyter_distrib.system import file_owner, interrupts, outside_text
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.kernel.views.dry_run import DryRun, DryRuns

LABEL_CHARACTERS = 60


def run_script(path: str | os.PathLike[str], *arguments: object, **options: Unpack[OptionKeywords]) -> Any:
    """Run a script on every rank of a pool, as torchrun does. Return None; with `detach=True` the `Run` at once; with
    `dry_run=True` the answer of a dry run.

    Args:
        path: The script; or `-m`, and the first argument is a module.
        arguments: Its arguments, which it finds in `sys.argv` as texts.
        options: The options of `%%distributed`.

    Raises:
        OptionsError: An option or an argument is wrong, or there is no such script.
        RankLost: A rank exited with a status other than 0.
        BaseException: The exception of the first rank that failed.
    """
    chosen = from_keywords(options, **session.current().settings.possible)
    if any(isinstance(each, (list, tuple, dict)) for each in arguments):
        raise OptionsError("run_script() takes the script's arguments one by one: put * in front of a list of them")
    try:
        return run(os.fspath(path), [str(each) for each in arguments], chosen)
    except KeyboardInterrupt as interrupt:
        stopped = early_interrupt(interrupt)
    raise stopped


with_options(run_script)


def run(
    path: str, arguments: Sequence[str], options: Options, *, command: str = "%distributed_run", given: str = ""
) -> Run | DryRun | DryRuns | None:
    """Run a script, or for the path `-m` the module that is the first argument, and show it; a detached one is returned
    at once, as is the answer of a dry run.

    Args:
        path: The script.
        arguments: Its arguments.
        options: The options of the run.
        command: The command in which they stand, for an error that says what to write.
        given: The options as they stand there.

    Raises:
        OptionsError: An option is wrong, or there is no such script.
    """
    path = os.path.expanduser(path)  # the shell's part
    if (not os.path.exists(path) or os.access(path, os.X_OK)) and (
        instead := launcher_lines.replacement(path, arguments, given)
    ):
        raise OptionsError(instead.format(command=command))
    for name in OF_CELLS:
        if getattr(options, name):
            flag = "--" + name.strip("_").replace("_", "-")
            raise OptionsError(f"{flag} is for cells: a script has no names of the notebook")
    cell = _of_module(arguments) if path == MODULE else _of_file(path, arguments)
    current = session.current()
    with interrupts.WholeImports():
        packed = payload.pack_inputs({}, {})
    notes: list[str] = []
    completed = current.settings.completed(options)
    if completed.needs_dry_run:
        from jupyter_distrib.kernel.notebook import dry_choice

        decided = dry_choice.decided(dry_choice.Asked(current=current, cell=cell, packed=packed, options=completed))
        if not isinstance(decided, tuple):
            return decided
        completed, notes = decided
    label = outside_text.shown(line_without_secrets((path, *arguments)), LABEL_CHARACTERS)
    request = CellRequest(cell=cell, inputs=packed, options=completed, label=label, notes=notes)
    if not options.detach:
        from jupyter_distrib.kernel.notebook.live_view import LiveView

        begun = current.start(request)
        current.wait(begun, LiveView(begun), completed.filled)
        return None
    from jupyter_distrib.kernel.notebook import runs_view

    begun = current.submit(request, here=True)
    begun.start.wait()
    runs_view.show([begun])
    return begun


def _of_file(path: str, arguments: Sequence[str]) -> m.Cell:
    return m.Cell(source=_read(path), filename=path, script=path, arguments=tuple(arguments))


def _of_module(arguments: Sequence[str]) -> m.Cell:
    if not arguments:
        raise OptionsError("-m needs the name of a module")
    name, *rest = arguments
    source = f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return m.Cell(source=source, filename=f"{file_owner.CALL}{name}", script=MODULE, arguments=tuple(rest))


def _read(path: str) -> str:
    """Return the text of a script. Raises `OptionsError` if it cannot be read, `SyntaxError` if it is not Python."""
    problem, text = "", ""
    try:
        with tokenize.open(path) as file:  # in the encoding that its first lines name
            text = file.read()
    except IsADirectoryError:
        problem = "it is a folder: name the script in it"
    except FileNotFoundError:
        problem = f"there is no such file in {os.getcwd()}" if not os.path.isabs(path) else "there is no such file"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise OptionsError(f"the script {path} cannot be read: {problem}")
    compile(text, path, "exec", dont_inherit=True)
    return text
