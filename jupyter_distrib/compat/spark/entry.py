"""The function by which a Spark task finds `task.execute`. Spark's own worker processes unpickle it too, and there
`import cloudpickle` may find pyspark's; so this module loads nothing before it is called. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def execute(
    run: str, token: str, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    """Call the function on this rank, report to the notebook, and return its value."""
    from jupyter_distrib.compat.spark import task

    return task.execute(run, token, function, args, keywords)


def run_script(path: str, *arguments: str) -> None:
    """Run a script as torchrun does; called on a rank, where `sys.argv` ends with what DeepSpeed adds."""
    import sys

    from jupyter_distrib.compat import on_ranks

    on_ranks.run_file(path, [*arguments, *sys.argv[1:]])
