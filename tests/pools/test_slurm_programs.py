"""A machine with some of Slurm's programs, as a container or a trimmed login node has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.slurm import allocation
from jupyter_distrib.pools.slurm.pool import SlurmPool

PROGRAMS = ("srun", "salloc", "scontrol", "scancel")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def install(path: Path, *names: str) -> None:
    for name in names:
        (path / name).write_text("#!/bin/sh\n")
        (path / name).chmod(0o755)


@pytest.mark.parametrize("missing", PROGRAMS)
def test_a_program_that_the_pool_needs_is_named_before_anything_starts(path: Path, missing: str) -> None:
    install(path, *(name for name in PROGRAMS if name != missing))
    with pytest.raises(PoolError, match=f"^the slurm pool needs {missing}, which is not installed here: start "):
        SlurmPool().check()


def test_in_a_job_no_job_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    install(path, "srun", "scontrol")
    assert SlurmPool().check()["job"] == "7"


def test_without_the_list_of_jobs_only_what_it_tells_is_missing(path: Path) -> None:
    assert path.is_dir()
    assert allocation.seconds_left("7") is None
    assert not allocation.is_another_queued("7")
    with pytest.raises(PoolError, match=r"^squeue cannot be started \(No such file or directory\)\.$"):
        allocation.output("squeue")
