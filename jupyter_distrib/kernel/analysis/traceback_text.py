"""Failures and stack frames as lines of text, in the manner of IPython's tracebacks. Kernel side; pure functions.

    chain(failure, ...)         the whole traceback: the failure's cause, its frames, its message
    opening(failure, ...)       its title and frames only
    frame_lines(frames, ...)    source around each line, with marks under the expression
    fingerprint(failure)        a key by which equal tracebacks are shown as one
    owner(filename)             the cell, the user, a library or this package

Of a stack only the user's frames are shown, and the library's frame that raised the exception; none of this package. A
frame's file may be on another machine, where Python is in other folders, so its owner is found by the name alone and no
file is read.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jupyter_distrib.system import process_environment
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import clipped
from jupyter_distrib.wire import messages as m

_Owner = Literal["cell", "user", "library", "package"]
"""The owner: a cell of the notebook, another file of the user, Python or an installed package, or this package."""

_CELL = "Cell In["
"""Prefix of the names of the notebook's cells."""
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python3\.\d+/|^<frozen")
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGE = re.compile(r"/(?:site-packages|source\.zip)/jupyter_distrib/")
"""Folder of this package on ranks that have a Python of their own, or to which it was sent."""


def owner(filename: str) -> _Owner:
    """Return the owner of the code in a file."""
    if filename.startswith(process_environment.OWN) or _PACKAGE.search(filename):
        return "package"
    if filename.startswith(_CELL):
        return "cell"
    is_library = _LIBRARY.search(filename) or filename.startswith(_STDLIB)
    return "library" if is_library else "user"


SourceOf = Callable[[str], Sequence[str] | None]
"""A function from a file name in a traceback to the file's lines, from index 0; None if they are unknown."""


SHOWN_FRAMES = 6
MESSAGE_CHARACTERS = 3000


_BOLD, _NOT_BOLD = "\x1b[1m", "\x1b[22m"


@data_class
class Rendering:
    """The lines that IPython shows for an exception; an object, since with a closure the exception would not pickle."""

    lines: tuple[str, ...]

    def __call__(self) -> list[str]:
        return list(self.lines)

    def plain(self) -> str:
        """Return the lines as one text without bold parts."""
        return "\n".join(self.lines).replace(_BOLD, "").replace(_NOT_BOLD, "")


@dataclass(frozen=True, slots=True)
class Paint:
    """Bold parts, or plain text.

    No colours: on the red ground of an error in JupyterLab, its green, red and yellow have contrasts of 2 to 5.
    """

    bold: bool

    def strong(self, text: str) -> str:
        return f"{_BOLD}{text}{_NOT_BOLD}" if self.bold else text


_FROM = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"


def chain(failure: m.Failure, source_of: SourceOf, paint: Paint, header: str) -> list[str]:
    """Return the lines of the failure, after those of its cause."""
    lines: list[str] = []
    if failure.cause is not None:
        inner = failure.cause
        if inner.cause is not None:
            lines.append(f"(first: {clipped(headline(inner.cause), 200)})")
        lines += [*frame_lines(user_frames(inner.frames)[-1:], source_of, paint), *_conclusion(inner, paint), ""]
        lines += [_DURING if failure.during else _FROM, ""]
    return [*lines, *opening(failure, source_of, paint, header), *_conclusion(failure, paint)]


def opening(failure: m.Failure, source_of: SourceOf, paint: Paint, header: str) -> list[str]:
    name = failure.type_name.rpartition(".")[2]
    title = f"{paint.strong(name)}  {header}"
    return [title, *frame_lines(user_frames(failure.frames), source_of, paint)]


def _conclusion(failure: m.Failure, paint: Paint) -> list[str]:
    name, message = failure.type_name.rpartition(".")[2], clipped(failure.message, MESSAGE_CHARACTERS)
    first, *rest = f": {message}".splitlines() if message else [""]
    return [paint.strong(name) + first, *rest, *(line for note in failure.notes for line in note.splitlines())]


_NCCL = re.compile(r"NCCL error in: \S+, (?P<what>[^,(]*[^,(\s])[\s\S]*?(?:\nLast error:\s*(?P<last>\S.*)|\Z)")


def headline(failure: m.Failure) -> str:
    """Return the exception's type with the first line of its message; for NCCL's, which begins with a file of torch,
    with what NCCL has reported last."""
    name, message = failure.type_name.rpartition(".")[2], failure.message.strip()
    if found := _NCCL.match(message):
        return f"{name}: NCCL: {found['what']}" + (f" ({found['last']})" if found["last"] else "")
    return f"{name}: {message.splitlines()[0]}" if message else name


def fingerprint(failure: m.Failure) -> str:
    """Return a text that is equal for failures with identical tracebacks, and for no others."""
    return hashlib.sha256(repr(_without_objects(failure)).encode(errors="backslashreplace")).hexdigest()[:16]


def _without_objects(failure: m.Failure) -> m.Failure:
    cause = failure.cause and _without_objects(failure.cause)
    return replace(failure, parcel=None, cause=cause)


def frame_lines(frames: Sequence[m.Frame], source_of: SourceOf, paint: Paint) -> list[str]:
    lines: list[str] = []
    hidden = max(0, len(frames) - SHOWN_FRAMES)
    shown = [*frames[: SHOWN_FRAMES // 2], *frames[len(frames) - SHOWN_FRAMES // 2 :]] if hidden else frames
    for index, frame in enumerate(shown):
        if hidden and index == SHOWN_FRAMES // 2:
            lines.append(f"    ... {hidden} more frames ...")
        function = f", in {frame.function}(...)" if frame.function not in ("", "<module>") else ""
        lines.append(paint.strong(place(frame)) + function)
        lines += _source_lines(frame, source_of(frame.filename) if is_user(frame) else None, paint)
    return lines


def _source_lines(frame: m.Frame, source: Sequence[str] | None, paint: Paint) -> Iterator[str]:
    """Yield the failing line with two lines around it, and marks under the expression if its columns are known."""
    if source is None or not 0 < frame.line <= len(source):
        if frame.text:
            yield f"{paint.strong(f'----> {frame.line}')} {frame.text}"
        return
    for number in range(max(1, frame.line - 2), min(len(source), frame.line + 2) + 1):
        text = source[number - 1].rstrip("\n")
        if number == frame.line:
            yield f"{paint.strong('----> ' + str(number))} {clipped(text, 400)}"
            yield from _marks(frame, text, " " * len(f"----> {number} "), paint)
        elif text.strip() and not (number == 1 and text.lstrip().startswith("%%")):
            yield f"{number:>{6 + len(str(frame.line))}} {clipped(text, 400)}"


def _marks(frame: m.Frame, text: str, indent: str, paint: Paint) -> Iterator[str]:
    first, last = frame.first_column, frame.last_column
    whole = text[:first].strip() == "" and text[last:].strip() == ""
    if 0 <= first < last <= min(len(text), 400) and not whole:
        yield indent + re.sub(r"[^\t]", " ", text[:first]) + paint.strong("^" * (last - first))


def user_frames(frames: Sequence[m.Frame]) -> list[m.Frame]:
    """Return the user's frames, then the library's frame that raised the exception, as context."""
    rest = [frame for frame in frames if owner(frame.filename) != "package"]
    of_user = [frame for frame in rest if is_user(frame)]
    if not of_user:
        return rest[-3:]
    return of_user if rest[-1] is of_user[-1] else [*of_user, rest[-1]]


def is_user(frame: m.Frame) -> bool:
    """Return whether the frame is in a cell or in another file of the user."""
    return owner(frame.filename) in ("cell", "user")


def place(frame: m.Frame) -> str:
    if owner(frame.filename) == "cell":
        return f"{frame.filename}, line {frame.line}"
    home = os.path.expanduser("~") + os.sep
    name = f"~/{frame.filename[len(home) :]}" if frame.filename.startswith(home) else frame.filename
    return f"File {name}:{frame.line}"


def innermost(frames: Sequence[m.Frame]) -> m.Frame | None:
    """Return the innermost frame in a cell of the user; if there is none, in the user's files."""
    in_cell = [frame for frame in frames if owner(frame.filename) == "cell"]
    candidates = in_cell or [frame for frame in frames if is_user(frame)]
    return candidates[-1] if candidates else None


def where(frame: m.Frame) -> str:
    """Return the place of a frame: `Cell In[5], line 14, in train`."""
    return place(frame) + (f", in {frame.function}" if frame.function not in ("", "<module>") else "")
