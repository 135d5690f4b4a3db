"""What a rank must not share with the process that it is forked from."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import warnings
import zipfile
from pathlib import Path

import pytest

from jupyter_distrib.worker.process import forkserver

PACKAGES = 40


def read_all(rank: int) -> None:
    for _ in range(5):
        for number in range(PACKAGES):
            assert importlib.metadata.version(f"one{(number + rank) % PACKAGES}") == "1"


def test_ranks_read_metadata_in_an_archive_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "source.zip", "w") as archive:
        for number in range(PACKAGES):
            text = f"Metadata-Version: 2.1\nName: one{number}\nVersion: 1\n\n{'long ' * 10_000}"  # more than is read at once
            archive.writestr(f"one{number}-1.dist-info/METADATA", text)
    monkeypatch.syspath_prepend(str(tmp_path / "source.zip"))
    assert importlib.metadata.version("one0") == "1", "the archive is open now"
    pids = []
    for rank in range(4):
        if (pid := os.fork()) == 0:
            try:
                forkserver._open_archives_anew()
                read_all(rank)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    importlib.metadata.MetadataPathFinder().invalidate_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Python leaves the open archive to the garbage collector
        gc.collect()
    assert ended == [0] * 4
