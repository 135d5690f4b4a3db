"""Packs this package into one file, for nodes that do not have it or have another version.

Python imports the file as it is: to make files of it takes a third of a second where the disk is busy. What Python has
compiled goes along, which the benchmark row of a first cell on new nodes defends.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path


def archive(distributions: Sequence[str] = ()) -> bytes:
    """Return the package's sources, with Python's bytecode if all of them are compiled.

    Args:
        distributions: Installed packages that go along, for nodes that may not have them: pure Python only.
    """
    root = Path(__file__).parent.parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        files = {path.relative_to(root.parent).as_posix(): path for path in sorted(root.rglob("*.py"))}
        codes = {f"{name}c": compiled(path) for name, path in files.items()}
        for name, path in files.items():
            file.write(path, name)
        for name, code in codes.items() if all(codes.values()) else ():  # all are to be in `environment.OWN`
            file.writestr(name, code)
        for name in distributions:
            _add(file, importlib.metadata.distribution(name))
    return buffer.getvalue()


def _add(file: zipfile.ZipFile, distribution: importlib.metadata.Distribution) -> None:
    """Add a distribution's modules, and the file by which Python knows its version."""
    for path in distribution.files or ():
        if path.suffix == ".py" or path.name == "METADATA":
            file.write(str(path.locate()), path.as_posix())


def compiled(path: Path) -> bytes:
    """Return Python's bytecode of a source file, for use on any machine; nothing if it is older than the file.

    The header says that its source need not be looked at (PEP 552); another version of Python passes it over.
    """
    try:
        content = Path(importlib.util.cache_from_source(str(path))).read_bytes()
    except OSError:
        return b""
    info = path.stat()
    is_of_source = content[4:16] == struct.pack("<III", 0, int(info.st_mtime), info.st_size)
    return content[:4] + struct.pack("<IQ", 1, 0) + content[16:] if is_of_source else b""
