"""The packages of the notebook's environment that ranks under another Python must have as well (`--environment`),
and, for a module that a rank cannot import, an explanation of which side lacks which package. Kernel side, standard
library only.

These are the packages that somebody has asked for, and what they need in turn; not torch, which comes with the ranks'
Python, nor the notebook's front end. The package of a module is looked for only after a failure, since that takes a
while.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import distributions, formatting, import_path
from jupyter_distrib.system.distributions import Distribution
from jupyter_distrib.wire import messages as m

WHEEL_LIMIT_BYTES = 64 << 20
"""Size of the largest package whose files are sent."""
_THEIR_OWN = frozenset({"torch", "triton", "cloudpickle", "threadpoolctl", "nvidia-ml-py", "jupyter-distrib"})
"""Packages that come with the ranks' Python, or with this package."""
_TOOLS = frozenset({"pip", "setuptools", "wheel", "uv", "distribute", "pkg-resources"})
_FRONT_END = re.compile(r"(jupyter|ipy|notebook|nb|voila|papermill|debugpy)")
"""Name prefixes of packages that run the notebook and take no part in computations."""
_REQUIREMENT = re.compile(r"Requires-Dist:\s*([A-Za-z0-9._-]+)(.*)")
_NO_MODULE = re.compile(r"No module named '([^'.]+)")


@dataclass(slots=True)
class _Inspection:
    """Result of the last inspection, and the state of the folders at that time."""

    stamps: tuple[tuple[str, int], ...] = ()
    packages: tuple[m.Package, ...] = ()
    source_folders: tuple[str, ...] = ()


_last = _Inspection()


def of_notebook(mode: str, limit_bytes: int) -> m.Packages:
    """Return the packages as they are now. Raises `PoolError` for a package that cannot be sent."""
    _inspect()
    return m.Packages(mode=mode, packages=_last.packages, limit_bytes=limit_bytes)


def source_folders() -> tuple[str, ...]:
    """Return the folders of editable packages, which are sent like the folders on the notebook's path."""
    _inspect()
    return _last.source_folders


def _inspect() -> None:
    """Inspect all packages, unless nothing was installed or removed since the last time."""
    stamps = tuple(_stamps(import_path.folders()))
    if stamps == _last.stamps:
        return
    found = distributions.installed(import_path.folders())
    editable = {name for name, each in found.items() if is_editable(each)}
    _last.packages = tuple(_package(found[name]) for name in sorted(wanted(found) - editable))
    _last.source_folders = tuple(_source_folder(found[name]) for name in sorted(editable - _THEIR_OWN))
    _last.stamps = stamps


def _stamps(path: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each folder of packages with its modification time, which changes when packages are installed or
    removed."""
    for folder in path:
        if folder.endswith("-packages") and os.path.isdir(folder):
            yield folder, os.stat(folder).st_mtime_ns


def wanted(found: Mapping[str, Distribution]) -> set[str]:
    """Return the names of the packages that were requested, and of their dependencies."""
    needs = {name: set(_needs(each, found)) for name, each in found.items()}
    needed = {need for name, each in needs.items() for need in each if name != need}
    left_out = {name for name in found if name in _THEIR_OWN | _TOOLS or _FRONT_END.match(name)}
    asked = {name for name, each in found.items() if name not in needed or _was_requested(each)}
    reached: set[str] = set()
    open_names = asked - left_out
    while open_names:
        name = open_names.pop()
        reached.add(name)
        open_names |= needs[name] - reached - left_out
    return {name for name in reached if not name.startswith(("nvidia-", "cuda-"))}


def _needs(each: Distribution, found: Mapping[str, Distribution]) -> Iterator[str]:
    """Yield the installed dependencies of a package; without extras, which may not have been requested."""
    for line in each.read("METADATA").partition("\n\n")[0].splitlines():
        match = _REQUIREMENT.match(line)
        if match and "extra" not in match[2].partition(";")[2] and distributions.normalized(match[1]) in found:
            yield distributions.normalized(match[1])


def _was_requested(each: Distribution) -> bool:
    return os.path.exists(os.path.join(each.folder, "REQUESTED"))


# ---------------------------------------------------------------------------------------------------- its origin


def origin(each: Distribution) -> dict[str, object]:
    """Return the source of a package that does not come from an index (PEP 610); else an empty text."""
    try:
        found = json.loads(each.read("direct_url.json") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def is_editable(each: Distribution) -> bool:
    """Return whether a package is installed as a source folder, which ranks get with the notebook's path."""
    info = origin(each).get("dir_info")
    return isinstance(info, dict) and bool(info.get("editable"))


def _source_folder(each: Distribution) -> str:
    """Return the folder from which an editable package is imported, in either of the usual layouts."""
    folder = unquote(urlsplit(str(origin(each).get("url", ""))).path)
    return os.path.join(folder, "src") if os.path.isdir(os.path.join(folder, "src")) else folder


def requirement(each: Distribution) -> str:
    """Return the requirement to pass to an installer; empty if no installer elsewhere can satisfy it."""
    source = origin(each)
    url = str(source.get("url", ""))
    if not url:
        return f"{each.name}=={distributions.public(each.version)}"
    if url.startswith("file:"):
        return ""
    vcs = source.get("vcs_info")
    if isinstance(vcs, dict):
        return f"{each.name} @ {vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return f"{each.name} @ {url}"


def _package(each: Distribution) -> m.Package:
    if asked := requirement(each):
        return m.Package(name=each.name, version=each.version, requirement=asked)
    file, wheel = as_wheel(each)
    if len(wheel) > WHEEL_LIMIT_BYTES:
        raise PoolError(
            f"{each.name} {each.version} was installed from a file of this machine and takes "
            f"{formatting.size(len(wheel))}, too much to send: install it on the hosts, or use --environment off."
        )
    return m.Package(name=each.name, version=each.version, file=file, wheel=wheel)


def as_wheel(each: Distribution) -> tuple[str, bytes]:
    """Return name and content of a wheel of the installed files; without scripts, which lie elsewhere."""
    base, info = os.path.split(each.folder)
    rows: list[tuple[str, str, str]] = []
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in sorted(_files(each)):
            with open(os.path.join(base, name), "rb") as file:
                data = file.read()
            wheel.writestr(zipfile.ZipInfo(name), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={digest}", str(len(data))))
        record = io.StringIO()
        csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record.getvalue())
    tag = re.search(r"^Tag: (\S+)", each.read("WHEEL"), re.MULTILINE)
    return f"{info.removesuffix('.dist-info')}-{tag[1] if tag else 'py3-none-any'}.whl", content.getvalue()


def _files(each: Distribution) -> Iterator[str]:
    base, info = os.path.split(each.folder)
    left_out = {f"{info}/{name}" for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
    for row in csv.reader(io.StringIO(each.read("RECORD"))):
        name = row[0] if row else ""
        inside = bool(name) and not os.path.isabs(name) and ".." not in name.split("/")
        if inside and name not in left_out and not name.endswith(".pyc") and os.path.isfile(os.path.join(base, name)):
            yield name


def explain_missing_modules(failure: m.Failure, python: str, node: str) -> m.Failure:
    """Return the failure with a note for each missing module in it and its causes.

    Args:
        failure: The exception of a rank.
        python: The interpreter of the ranks; empty if it is not known.
        node: The machine of the rank; empty if it is the notebook's.
    """
    cause = failure.cause and explain_missing_modules(failure.cause, python, node)
    match = _NO_MODULE.match(failure.message) if failure.type_name == "ModuleNotFoundError" else None
    notes = failure.notes if match is None else (*failure.notes, _note(match[1], python, node))
    return replace(failure, cause=cause, notes=notes)


def _note(module: str, python: str, node: str) -> str:
    named = python or "python3"
    place = f"the Python of this rank ({f'{named} on {node}' if node else named})"
    if _spec(module) is None:
        return f"The notebook does not have {module} either: install it there and in {place}."
    owner = _owner_of(module)
    if owner is None:
        return (
            f"The notebook has a module {module} that belongs to no installed package, and {place} has none: "
            "put its file into the notebook's folder."
        )
    if is_editable(owner):
        return (
            f"The notebook has {owner.name} {owner.version} as a folder of sources, and {place} has none: "
            "add that folder to sys.path in the notebook, or install it there."
        )
    asked = requirement(owner) or "FILE"
    return (
        f"The notebook has {owner.name} {owner.version}, and {place} has none: run `{named} -m pip install {asked}` "
        "there, or have missing packages installed by --environment sync."
    )


def _spec(module: str) -> object | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return sys.modules.get(module)


def _owner_of(module: str) -> Distribution | None:
    """Return the package that provides a module in the notebook; None if no package does."""
    found = distributions.installed(import_path.folders())
    own = found.get(distributions.normalized(module))
    for each in ([own] if own else []) + list(found.values()):
        listed = each.read("RECORD")
        if any(line.startswith((f"{module}/", f"{module}.")) for line in listed.splitlines()):
            return each
        if module in each.read("top_level.txt").split():
            return each
    return own
