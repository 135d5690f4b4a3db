"""Finds a Slurm by its programs in PATH, and the job that the notebook is in by its variable. Starts no program."""

from __future__ import annotations

import os
import shutil

from jupyter_distrib.pools.discovery import Found, pool_name


def found() -> list[Found]:
    """Return one pool if srun is installed."""
    if (program := shutil.which("srun")) is None:
        return []
    job = os.environ.get("SLURM_JOB_ID", "")
    text = f"Slurm: job {job}, in which the notebook runs" if job.isdecimal() else f"Slurm: {program}"
    return [Found(kind="slurm", name=pool_name("cluster", "slurm"), text=text, options={})]
