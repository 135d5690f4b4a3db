"""Packs this package into one file, for nodes that lack it or have another version.

Python imports the file as it is: unpacking it takes a third of a second on a busy disk. Bytecode is included,
because it makes the first cell on new nodes faster (see that row of the benchmarks).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jupyter_distrib.system import import_path

_READ = "jupyter_distrib/wire/messages/"
"""Folder whose sources determine the version of the protocol."""


def archive(distributions: Sequence[str] = (), *, any_python: bool = True) -> bytes:
    """Return the package's sources, with Python's bytecode if all of them are compiled.

    Args:
        distributions: Installed packages that go along, for nodes that may not have them: pure Python only.
        any_python: Whether the sources are included even if all of them are compiled: only this version of Python can
            do without them, which halves the file.
    """
    root = Path(__file__).parent.parent
    files = {path.relative_to(root.parent).as_posix(): path for path in sorted(root.rglob("*.py"))}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        _add(file, files, any_python=any_python)
        for name in distributions:
            _add_distribution(file, import_path.distribution(name), any_python=any_python)
    return buffer.getvalue()


def _add(file: zipfile.ZipFile, files: Mapping[str, Path], *, any_python: bool) -> None:
    """Add modules by their names in the archive."""
    codes = {f"{name}c": compiled(path) for name, path in files.items()}
    are_compiled = all(codes.values())  # all must be in `environment.OWN`
    for name, path in files.items():
        if any_python or not are_compiled or _READ in name:
            file.write(path, name)
    for name, code in codes.items() if are_compiled else ():
        file.writestr(name, code)


def _add_distribution(
    file: zipfile.ZipFile, distribution: importlib.metadata.Distribution, *, any_python: bool
) -> None:
    """Add a distribution's modules, and the file by which Python knows its version."""
    paths = {path.as_posix(): Path(str(path.locate())) for path in distribution.files or ()}
    _add(file, {name: path for name, path in paths.items() if path.suffix == ".py"}, any_python=any_python)
    for name, path in paths.items():
        if path.name == "METADATA":
            file.write(path, name)


def compiled(path: Path) -> bytes:
    """Return Python's bytecode of a source file, for use on any machine; nothing if it is older than the file.

    The header says that its source need not be looked at (PEP 552); another version of Python skips it.
    """
    try:
        content = Path(importlib.util.cache_from_source(str(path))).read_bytes()
    except OSError:
        return b""
    info = path.stat()
    is_of_source = content[4:16] == struct.pack("<III", 0, int(info.st_mtime), info.st_size)
    return content[:4] + struct.pack("<IQ", 1, 0) + content[16:] if is_of_source else b""
