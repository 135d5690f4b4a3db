"""Puts the sidebar into the wheel, and links that work elsewhere into the readme. Called by hatchling when the package
is built.

What is built already (`sh .ci/sidebar`, or in a source distribution) is taken. Else it is built, if node is there. Else
the wheel goes without the sidebar: all of the rest works, and `%distributed_status --doctor` says what is missing.
JUPYTER_DISTRIB_SIDEBAR=require makes that an error, for CI and releases; =skip takes only what is built already.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

STAMP = "sources.txt"
WITHOUT = "jupyter_distrib/without_sidebar.txt"
"""In a wheel without the sidebar: why. `%distributed_status --doctor` reads it, since pip hides what a build says."""


class SidebarHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Builds `labextension/` into `jupyter_distrib/labextension/`."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """The builder is asked for only where something is going to be built."""
        return ["jupyter-builder>=1.3"] if self._what_to_do() == "build" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        match self._what_to_do(editable=version == "editable"):
            case "build":
                self._build()
            case "nothing" if os.environ.get("JUPYTER_DISTRIB_SIDEBAR") == "require":
                raise RuntimeError("The sidebar is not built, and node is not there to build it.")
            case "nothing" if os.environ.get("JUPYTER_DISTRIB_SIDEBAR") != "skip":
                self._trouble = "Node.js was not there to build it"
        if not self._built():
            self._tell(build_data, editable=version == "editable")
            return
        place = "share/jupyter/labextensions/jupyter-distrib"
        build_data["artifacts"].append("jupyter_distrib/labextension")
        if self.target_name == "wheel":
            shared = build_data.setdefault("shared_data", {})
            shared[str(self._output)] = place
            shared[str(self._sources / "install.json")] = f"{place}/install.json"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file that was made for the wheel."""
        self._told.unlink(missing_ok=True)

    _trouble = ""

    @property
    def _told(self) -> Path:
        return Path(self.directory) / "without_sidebar.txt"

    def _tell(self, build_data: dict[str, Any], *, editable: bool) -> None:
        """Say in the build's output why there is no sidebar, and in a wheel, too."""
        if not self._trouble:
            return
        self.app.display_warning(
            f"Installing without the JupyterLab sidebar: {self._trouble}. Install Node.js 20 or newer "
            "(https://nodejs.org, conda install nodejs) and then this package again; all of the rest works without it."
        )
        if self.target_name == "wheel" and not editable:
            self._told.parent.mkdir(parents=True, exist_ok=True)
            self._told.write_text(self._trouble)
            build_data["force_include"][str(self._told)] = WITHOUT

    @property
    def _sources(self) -> Path:
        return Path(self.root) / "labextension"

    @property
    def _output(self) -> Path:
        return Path(self.root) / "jupyter_distrib" / "labextension"

    def _what_to_do(self, *, editable: bool = False) -> str:
        """`take` what is there, `build`, or `nothing`."""
        wanted = os.environ.get("JUPYTER_DISTRIB_SIDEBAR", "")
        if self._built() and (wanted == "skip" or editable or self._is_current()):
            return "take"
        if wanted == "skip" or editable or not self._sources.is_dir() or shutil.which("node") is None:
            return "nothing"
        return "build"

    def _built(self) -> bool:
        return (self._output / "package.json").is_file()

    def _is_current(self) -> bool:
        stamp = self._output / STAMP
        return not self._sources.is_dir() or (stamp.is_file() and stamp.read_text() == digest(self._sources))

    def _build(self) -> None:
        jlpm = [sys.executable, "-c", "from jupyter_builder.jlpm import main; main()"]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        for command in ([*jlpm, "install", "--immutable"], [*jlpm, "build"]):
            done = subprocess.run(
                command,
                cwd=self._sources,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                if os.environ.get("JUPYTER_DISTRIB_SIDEBAR") == "require":
                    raise RuntimeError(f"The sidebar cannot be built:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
                self._trouble = f"it could not be built: {' '.join(done.stdout[-400:].split())}"
                return
        (self._output / STAMP).write_text(digest(self._sources))


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]
    """Gives the package the README, as it can be read outside of the repository, such as on PyPI."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text("utf-8")
        urls = metadata["urls"]
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readable_elsewhere(text, site=urls["Documentation"], source=urls["Source"]),
        }


def readable_elsewhere(text: str, *, site: str, source: str) -> str:
    """Return the README with links to the site and the repository in place of paths, and one picture for all themes."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match["path"], match["anchor"] or ""
        page = re.fullmatch(r"docs/([\w-]+)\.md", path)
        return f"]({site}{page[1]}.html{anchor})" if page else f"]({source}/blob/main/{path}{anchor})"

    text = re.sub(r"\]\((?P<path>(?!https?:)[\w./-]+)(?P<anchor>#[^)\s]*)?\)", link, text)
    return re.sub(
        r'<picture>.*?<img alt="(?P<alt>[^"]*)" src="(?P<path>[^"]*)">\s*</picture>',
        lambda match: f"![{match['alt']}]({source}/raw/main/{match['path']})",
        text,
        flags=re.DOTALL,
    )


def digest(sources: Path) -> str:
    """Of everything that the sidebar is made from."""
    summed = hashlib.sha256()
    for path in sorted(_files(sources)):
        summed.update(f"{os.path.relpath(path, sources)}\0".encode() + path.read_bytes() + b"\0")
    return summed.hexdigest()


def _files(sources: Path) -> Iterator[Path]:
    for name in ("package.json", "yarn.lock", "tsconfig.json", ".yarnrc.yml"):
        yield sources / name
    for folder in ("src", "style", "schema", "../jupyter_distrib/kernel/views/static"):
        yield from (path for path in (sources / folder).rglob("*") if path.is_file())
