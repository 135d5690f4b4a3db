"""Keeps the copy of a notebook's files on a node that does not have its folder. Runs in the threads in which the engine
calls the relay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from jupyter_distrib.wire import messages as m


class ProjectCopy:
    """The copy, in its own folder: each folder of the kernel's machine is a numbered folder in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.used = False
        """Whether cells run in this copy, rather than in the notebook's folder."""

    def update(self, files: Sequence[tuple[str, int, bytes]], gone: Sequence[str]) -> list[tuple[str, str]]:
        """Write files that have changed, given by path, time of change and content, and remove those that are gone.
        Returns the files that could not be written, with the reasons. From now on cells run in this copy."""
        self.used = True
        failed = []
        for name in gone:
            self._remove(self._folder / name)
        for name, mtime_ns, content in files:
            path = self._folder / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                os.utime(path, ns=(mtime_ns, mtime_ns))  # a changed module is imported again
            except OSError as error:
                failed.append((name, error.strerror or str(error)))
        return failed

    def _remove(self, path: Path) -> None:
        """Remove a file, and its folders as far as they are empty then: a file may be where a folder was."""
        with suppress(OSError):
            path.unlink(missing_ok=True)
            while (path := path.parent).parent != self._folder:
                path.rmdir()

    def locate(self, command: m.Execute) -> m.Execute:
        """Return the command with the folders of this copy in place of the kernel's."""
        setting = command.setting
        folders = dict.fromkeys((setting.directory, *setting.path))
        copies = {folder: str(self._folder / str(number)) for number, folder in enumerate(folders)}
        for copy in copies.values():
            os.makedirs(copy, exist_ok=True)
        path = tuple(copies[folder] for folder in setting.path)
        return replace(command, setting=replace(setting, path=path, directory=copies[setting.directory]))
