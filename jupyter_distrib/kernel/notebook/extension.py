"""Loads the extension into a shell and removes it again (`%load_ext jupyter_distrib`, `%unload_ext jupyter_distrib`),
with the tab completion of options in `%%distributed` lines: only our options, none of Python's names. Runs in the
kernel's main thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import stand_ins
from jupyter_distrib.kernel.notebook import comment_syntax
from jupyter_distrib.kernel.notebook.line_magics import LineMagics
from jupyter_distrib.kernel.notebook.magic import CellMagics
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs import prompts
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.help import complete
from jupyter_distrib.kernel.sidebar import bridge, cell_outputs
from jupyter_distrib.system import interrupts

_OURS = ("distributed", "distrib")
_replaced: dict[str, Callable[..., Any]] = {}
_undo = ExitStack()
"""Ends the repetition of interrupts that finalizers swallow."""


def load(shell: InteractiveShell) -> None:
    """Load the extension (`%load_ext jupyter_distrib`); a second time changes nothing."""
    registry = shell.magics_manager.magics["cell"]
    for name in _OURS:
        other = registry.get(name)
        if other is not None and not isinstance(getattr(other, "__self__", None), CellMagics):
            _replaced[name] = other
            print(f"%%{name} was {_home(other)}'s; it is jupyter_distrib's until %unload_ext jupyter_distrib.")
    shell.register_magics(CellMagics, LineMagics)
    _install_completion(shell)
    bridge.install(shell)
    comment_syntax.install(shell)
    shell.events.register("post_run_cell", _cell_ended)
    _undo.close()
    _undo.callback(interrupts.repeat_swallowed())
    prompts.front_end = partial(cell_outputs.missing_prompt, shell)
    with suppress(DistributedError):  # a settings file that is wrong: the first cell will say so
        stand_ins.enable(session.current().settings.compat)


def _cell_ended(result: ExecutionResult) -> None:
    """Free the values on the ranks whose handles the cell has dropped. If it failed on a name that only the ranks had,
    say so below its traceback."""
    current, error = session.current(), result.error_in_exec
    current.pass_on()
    if not isinstance(error, NameError) or hasattr(error, "_render_traceback_"):  # those of ranks say so themselves
        return
    name = error.name or ""
    if (dropped := current.dropped.get(name)) is not None:
        print(dropped.explained(name), file=sys.stderr)


def _home(magic: Callable[..., Any]) -> str:
    """Return the package that a magic belongs to, by its `__module__`."""
    module = getattr(magic, "__module__", None) or type(magic).__module__
    return "this notebook" if module == "__main__" else module.partition(".")[0]


def unload(shell: InteractiveShell) -> None:
    """Unload the extension (`%unload_ext jupyter_distrib`): end the ranks, and restore the magics that it replaced."""
    bridge.remove()
    prompts.front_end = prompts.terminal
    _remove_completion(shell)
    comment_syntax.remove(shell)
    shell.events.unregister("post_run_cell", _cell_ended)
    _undo.close()
    lines, cells = ({*CellMagics.magics[kind], *LineMagics.magics[kind]} for kind in ("line", "cell"))
    for kind, names in {"cell": cells, "line": lines}.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.magics["cell"].update(_replaced)
    _replaced.clear()
    session.close()


@context_matcher(identifier="jupyter_distrib", priority=100)  # type: ignore[untyped-decorator]  # IPython's has no types
def _matcher(context: CompletionContext) -> SimpleMatcherResult:
    """Return the words that can complete the magic line at the cursor."""
    line = context.line_with_cursor[: context.cursor_position]
    rest = _options_in(line)
    if rest is None or context.cursor_line != 0:
        return {"completions": []}
    word = rest.rpartition(" ")[2]
    try:
        words = complete(rest, **session.current().settings.possible)
    except DistributedError:  # a settings file that is wrong: the cell will say so
        words = complete(rest, strategies=STRATEGIES, pools=POOLS)
    return {
        "completions": [SimpleCompletion(text, type="option") for text in words],
        "matched_fragment": word,
        "suppress": True,
    }


def _options_in(line: str) -> str | None:
    """Return the text after the magic, or after the comment that replaces it; None where options cannot stand."""
    magic, space, rest = line.partition(" ")
    if magic in comment_syntax.MAGICS:
        return rest if space else None
    start, colon, rest = line.partition(":")
    return rest if comment_syntax.magic_line(start + colon) else None


def _install_completion(shell: InteractiveShell) -> None:
    if _matcher not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_matcher)


def _remove_completion(shell: InteractiveShell) -> None:
    if _matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(_matcher)
