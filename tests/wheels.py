"""Small real packages for tests of what ranks lack."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path


def wheel(folder: Path, name: str, version: str, *, needs: str = "", size_bytes: int = 0) -> Path:
    """Write a wheel with one module that knows its version."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"version = {version!r}\n" + "#" * size_bytes,
        f"{info}/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def install(wheel: Path, target: Path) -> None:
    """Install a wheel into a folder, as `%pip install FILE` does."""
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, wheel], check=True)


def environment(folder: Path) -> tuple[Path, Path]:
    """Make an environment that has all packages of this one; return its interpreter and its folder of packages."""
    venv.create(folder, symlinks=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "more.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin" / "python", packages
