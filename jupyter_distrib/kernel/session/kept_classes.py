"""The classes of kept values, which use functions and other names that the notebook may define anew afterwards.

A later cell that reads the value gets these classes once more then, with what they use now; the ranks set them anew in
place, so that the kept objects use it as well. Nothing is sent while nothing has changed. Kernel side, in the thread
that runs the cell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

from jupyter_distrib.kernel.capture.capture import Captured, Input, global_names, reachable
from jupyter_distrib.kernel.capture.inputs import PackedInputs
from jupyter_distrib.kernel.session.runs.results import RankValue

_NAME = "__distributed_classes__"
"""The name of the input that holds the classes."""


class KeptClasses:
    """The notebook's classes that ranks have received by the end of a run, and what they used then.

    Args:
        classes: The classes.
        defines: The names that the cell of the run binds: it may have given the classes functions of its own.
        notebook: The names of the notebook.
    """

    def __init__(self, classes: Iterable[type], defines: Iterable[str], notebook: Mapping[str, object]) -> None:
        self.classes = tuple(classes)
        self._known = {name: _identity(notebook.get(name, _ABSENT)) for name in _used(self.classes, notebook)}
        self.has_own = not self._known.keys().isdisjoint(defines)
        """Whether the classes use names of the cell itself, which ended with it: they cannot be sent again."""
        self._differ = False

    def changed(self, defines: Iterable[str], notebook: Mapping[str, object]) -> list[str]:
        """Return the names that mean something else to the notebook now, or that a cell binds itself. Once there were
        any, the ranks may have a changed class: then all names count."""
        now = {name: notebook.get(name, _ABSENT) for name in self._known}
        changed = {name for name, was in self._known.items() if type(now[name]) is not RankValue and not was(now[name])}
        changed |= self._known.keys() & set(defines)
        if self._differ:
            changed |= self._known.keys()
        elif changed and not self.has_own:
            self._differ = True
        return sorted(changed)


_ABSENT = object()


def _used(classes: Iterable[type], notebook: Mapping[str, object]) -> set[str]:
    inputs = [
        Input(name=f"{number}", value=cls, line=0, certain=False, reason="") for number, cls in enumerate(classes)
    ]
    direct = {name for each in inputs for name in global_names(each.value)}
    return direct | reachable(inputs, notebook).keys()


def _identity(value: object) -> Callable[[object], bool]:
    """Return a function that tells whether its argument is this value, which is not kept alive if it may be large."""
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        return lambda now: now is value or (type(now) is type(value) and bool(now == value))
    try:
        found = weakref.ref(value)
    except TypeError:  # a list, a dictionary
        number, cls = id(value), type(value)
        return lambda now: id(now) == number and type(now) is cls
    return lambda now: found() is now


def to_send(
    captured: Captured, handles: Iterable[RankValue], notebook: Mapping[str, object]
) -> tuple[Input | None, list[str], list[str]]:
    """Return what brings the classes of kept values up to date.

    Returns:
        An input with the classes that use something else by now, None if there are none; a sentence on each value whose
        classes cannot be sent again; and one on each of the others, for the case that the input cannot be sent.
    """
    classes: dict[type, None] = {}
    fixed: list[str] = []
    others: list[str] = []
    for handle in handles:
        if handle.classes is None or not (changed := handle.classes.changed(_bound(captured), notebook)):
            continue
        names = ", ".join(f"`{name}`" for name in changed)
        text = (
            f"`{handle.name}` goes on with the {names} that it was kept with: run the cell that made it again to "
            "change that"
        )
        (fixed if handle.classes.has_own else others).append(text)
        if not handle.classes.has_own:
            classes.update(dict.fromkeys(handle.classes.classes))
    if not classes:
        return None, fixed, []
    more = Input(name=_NAME, value=tuple(classes), line=0, certain=False, reason="used by a kept value")
    return more, fixed, others


def _bound(captured: Captured) -> set[str]:
    return set(captured.defines) - captured.imports


def after(
    captured: Captured,
    packed_inputs: PackedInputs,
    handles: Iterable[RankValue],
    notebook: Mapping[str, object],
    keep: Iterable[str],
) -> KeptClasses | None:
    """Return the classes that values kept by a cell under the names `keep` may have; None if there are none."""
    found = dict.fromkeys(each for each in packed_inputs.packed.sent if isinstance(each, type))
    for handle in handles:
        found.update(dict.fromkeys(handle.classes.classes if handle.classes else ()))
    return KeptClasses(found, _bound(captured) - set(keep), notebook) if found else None
