"""The tab completion of options in `%%distributed` lines: only our options, none of Python's names. Kernel side."""

from __future__ import annotations

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.notebook import comment_syntax
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.help import complete

_MAGICS = ("%%distributed", "%%distrib")


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
    """Return the text behind the magic, or behind the comment that stands for it; None where no option can stand."""
    magic, space, rest = line.partition(" ")
    if magic in _MAGICS:
        return rest if space else None
    start, colon, rest = line.partition(":")
    return rest if comment_syntax.magic_line(start + colon) else None


def install(shell: InteractiveShell) -> None:
    if _matcher not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_matcher)


def remove(shell: InteractiveShell) -> None:
    if _matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(_matcher)
