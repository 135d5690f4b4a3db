"""Says of a module that a rank cannot import which side lacks which package. Kernel side; looks only after a failure,
since to find the package of a module takes a while."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace

from jupyter_distrib.kernel.session.pools import notebook_packages
from jupyter_distrib.system import distributions
from jupyter_distrib.system.distributions import Distribution
from jupyter_distrib.wire import messages as m

_NO_MODULE = re.compile(r"No module named '([^'.]+)")


def explained(failure: m.Failure, python: str, node: str) -> m.Failure:
    """Return the failure with a note for each missing module in it and its causes.

    Args:
        failure: The exception of a rank.
        python: The interpreter of the ranks; empty if it is not known.
        node: The machine of the rank; empty if it is the notebook's.
    """
    cause = failure.cause and explained(failure.cause, python, node)
    match = _NO_MODULE.match(failure.message) if failure.type_name == "ModuleNotFoundError" else None
    notes = failure.notes if match is None else (*failure.notes, _note(match[1], python, node))
    return replace(failure, cause=cause, notes=notes)


def _note(module: str, python: str, node: str) -> str:
    named = python or "python3"
    place = f"the Python of this rank ({f'{named} on {node}' if node else named})"
    if _spec(module) is None:
        return f"The notebook does not have {module} either: install it there and in {place}."
    owner = owner_of(module)
    if owner is None:
        return (
            f"The notebook has a module {module} that no installed package has brought, and {place} has none: "
            "put its file into the notebook's folder."
        )
    if notebook_packages.is_editable(owner):
        return (
            f"The notebook has {owner.name} {owner.version} as a folder of sources, and {place} has none: "
            "add that folder to sys.path in the notebook, or install it there."
        )
    asked = notebook_packages.requirement(owner) or "FILE"
    return (
        f"The notebook has {owner.name} {owner.version}, and {place} has none: run `{named} -m pip install {asked}` "
        "there, or have missing packages installed by --environment sync."
    )


def _spec(module: str) -> object | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return sys.modules.get(module)


def owner_of(module: str) -> Distribution | None:
    """Return the package that has brought a module to the notebook; None for one that no package has."""
    found = distributions.installed(sys.path)
    own = found.get(distributions.normalized(module))
    for each in ([own] if own else []) + list(found.values()):
        listed = each.read("RECORD")
        if any(line.startswith((f"{module}/", f"{module}.")) for line in listed.splitlines()):
            return each
        if module in each.read("top_level.txt").split():
            return each
    return own
