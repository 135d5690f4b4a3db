"""`python -m jupyter_distrib.agent.install_packages`: compares this Python's packages with those of a notebook, and
installs what is missing into a folder beside it. A process of its own, started by `agent/package_sync.py`, under the
interpreter of the ranks.

Reads the `OpenWorkerGroup` from standard input, and writes lines of JSON: `{"installing": ...}`, and at last a
`PackageReport`. A folder is named by its contents, made once, and used by all ranks that need the same packages; if
another process is making it, this one waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from jupyter_distrib.addresses import without_secrets
from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import distributions, formatting, import_path, paths, scratch
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import decode_frame

KEPT_S = 30 * 86_400.0
"""Seconds for which a folder that nobody uses is kept."""
INSTALL_S = 1800.0
_MAKING = ".making-"
"""Prefix of incomplete folders; killed processes may leave some behind."""
_SHOWN = 10
"""Number of packages that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageReport:
    """The result of the comparison."""

    overlay: str = ""
    """Folder with the packages that were missing; empty if nothing was."""
    note: str = ""
    """Sentence on packages with different versions, and on packages that were installed."""
    refusal: str = ""
    """Reason why there can be no ranks."""


class Refused(Exception):
    """An error that says in a sentence why there can be no ranks."""


def main() -> None:
    command, _ = decode_frame(sys.stdin.buffer.read())
    assert isinstance(command, m.OpenWorkerGroup)
    assert command.packages is not None
    try:
        outcome = compare(command.packages)
    except Refused as error:
        outcome = PackageReport(refusal=without_secrets(str(error)))
    except OSError as error:
        outcome = PackageReport(refusal=f"the notebook's packages cannot be installed here: {error}.")
    print(json.dumps(asdict(outcome)), flush=True)


def compare(wanted: m.Packages) -> PackageReport:
    """Compare the packages, and install what is missing if that is wanted. Raises `Refused`."""
    present = distributions.installed(import_path.folders())
    missing = [each for each in wanted.packages if each.name not in present]
    differing = [
        f"{each.name} {there.version} ({each.version} in the notebook)"
        for each in wanted.packages
        if (there := present.get(each.name)) is not None
        and distributions.public(there.version) != distributions.public(each.version)
    ]
    note = f"the ranks have other versions of packages: {_listed(differing)}" if differing else ""
    if not missing:
        return PackageReport(note=note)
    if wanted.mode == "check":
        raise Refused(_lacking(missing))
    folder = installed(missing, wanted.limit_bytes)
    return PackageReport(overlay=str(folder), note=note)


def _lacking(missing: Sequence[m.Package]) -> str:
    asked = [each.requirement or f"{each.name}=={each.version}" for each in missing]
    return (
        f"the Python of the ranks ({sys.executable}) lacks {_count(missing)} that the "
        f"notebook has: {_named(missing)}. Install them there (`{sys.executable} -m pip install {' '.join(asked)}`), "
        "or let --environment sync do it."
    )


def _count(packages: Sequence[m.Package]) -> str:
    return "a package" if len(packages) == 1 else f"{len(packages)} packages"


def _named(packages: Sequence[m.Package]) -> str:
    return _listed([f"{each.name} {each.version}" for each in packages])


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


# ---------------------------------------------------------------------------------------------------- the folder


def installed(packages: Sequence[m.Package], limit_bytes: int) -> Path:
    """Return the folder that has these packages. Raises `Refused`."""
    base = folders()
    folder = base / _name(packages)
    with _locked(base / f"{folder.name}.lock"):
        paths.clear(folder, stat.S_IFDIR)
        if not folder.is_dir():
            print(json.dumps({"installing": _named(packages)}), flush=True)
            with tempfile.TemporaryDirectory(prefix=_MAKING, dir=base) as made:
                _install(packages, made := os.path.join(made, "packages"))
                if (size_bytes := _size_bytes(made)) > limit_bytes:
                    raise Refused(
                        f"the packages that the ranks lack take {formatting.size(size_bytes)}, more than the "
                        f"{formatting.size(limit_bytes)} that may be installed for them ({_named(packages)}): "
                        "allow more with --environment-limit, or install them there yourself."
                    )
                os.rename(made, folder)
        os.utime(folder)
    _remove_unused(base)
    return folder


def folders() -> Path:
    """Return the folder of all folders of packages, in the user's cache. Raises `Refused` if it is somebody else's: the
    ranks import from it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(paths.home(), ".cache")
    try:
        own = paths.private(Path(cache, "jupyter_distrib"), "XDG_CACHE_HOME")
        return paths.private(own / "packages", "XDG_CACHE_HOME")
    except PoolError as error:
        raise Refused(f"the notebook's packages cannot be installed here: {error}") from error


def _name(packages: Sequence[m.Package]) -> str:
    """Return the name of the folder for these packages under this Python."""
    parts = [sys.version, sysconfig.get_platform(), str(sys.prefix)]
    parts += sorted(f"{each.name} {each.version} {each.requirement}" for each in packages)
    wheels = [each.wheel for each in sorted(packages, key=lambda each: each.name)]
    return hashlib.sha256(b"\0".join(["\n".join(parts).encode(), *wheels])).hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with paths.opened(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _size_bytes(folder: str) -> int:
    return sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(folder) for name in names)


def _remove_unused(base: Path) -> None:
    """Remove folders that no rank has used for a month, and the remains of killed processes."""
    for folder in base.iterdir():
        kept_s = 2 * INSTALL_S if folder.name.startswith(_MAKING) else KEPT_S
        if folder.is_dir() and time.time() - folder.stat().st_mtime > kept_s:
            with _locked(base / f"{folder.name}.lock"):
                shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------- the installer


def _install(packages: Sequence[m.Package], target: str) -> None:
    with scratch.folder() as wheels:
        asked = [each.requirement or _written(each, str(wheels)) for each in packages]
        command = [*_installer(), "--no-deps", "--target", target, *asked]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                env=env,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Refused(f"the notebook's packages could not be installed within {INSTALL_S / 60:.0f} min.") from None
    if done.returncode or not os.path.isdir(target):
        said = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        last = next((line for line in reversed(said) if "error" in line.lower()), said[-1] if said else "")
        raise Refused(
            f"the packages that the ranks lack ({_named(packages)}) could not be installed beside "
            f"{sys.executable}: {last[:300]} (status {done.returncode} of `{' '.join(command[:4])} ...`)."
        )


def _written(package: m.Package, folder: str) -> str:
    path = os.path.join(folder, os.path.basename(package.file))
    with open(path, "wb") as file:
        file.write(package.wheel)
    return path


def _installer() -> list[str]:
    """Return the command that installs packages for this Python. Raises `Refused`."""
    uv = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    if importlib.util.find_spec("pip") is not None:
        return [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-warn-script-location",
        ]
    raise Refused(
        f"{sys.executable} has neither uv nor pip, so the packages that the ranks lack cannot be installed there: "
        "install uv on that machine, or leave out --environment."
    )


if __name__ == "__main__":
    main()
