"""Tests of a connection: what they say, and that nothing of them is left when they are given up."""

from __future__ import annotations

import os
import queue
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from jupyter_distrib.pools import trial
from jupyter_distrib.pools.slurm import command as slurm
from jupyter_distrib.pools.trial import Trial, try_out, versions
from tests.processes import wait_until_gone

ENV = f"env HOST={{host}} {shlex.quote(sys.executable)} -I -"
Results = queue.Queue[tuple[bool, str]]


def started(kind: str, options: Mapping[str, str]) -> tuple[Trial, Results]:
    results: Results = queue.Queue()
    return Trial(kind, options, lambda ok, text: results.put((ok, text))), results


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_hosts_that_answer_are_reported_with_their_versions(tmp_path: Path) -> None:
    reach = program(tmp_path / "reach", 'echo "Welcome!"; shift; exec "$@"')
    options = {"hosts": "a,b", "start": f"{reach} {{host}} {{python}}", "python": sys.executable}

    version = ".".join(map(str, sys.version_info[:3]))
    told = try_out("command", options)
    assert told[0]
    assert told[1].startswith(f"All 2 hosts answer, with Python {version} and torch ")
    assert try_out("command", {**options, "hosts": "a"})[1].startswith("a answers, with Python ")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ('if [ "$1" = b ]; then echo no route >&2; exit 7; fi; shift; exec "$@"', "1 of 2 hosts can be used: `"),
        ("exit 127", "0 of 2 hosts can be used: there is no Python at"),
        ("printf '\\0:trial 3.9.1 2.9:\\n'", "has Python 3.9.1 at"),
        ("printf '\\0:trial 3.12.1 :\\n'", "has no torch: set python to an interpreter with torch there."),
        ("printf '\\0:trial 3.12.1 2.9:'", "All 2 hosts answer, with Python 3.12.1 and torch 2.9."),
        (
            'printf "\\0:trial 3.12.%s 2.9:" $(test $1 = a && echo 1 || echo 2)',
            "different versions: a with Python 3.12.1 and torch 2.9, b with Python 3.12.2 and torch 2.9.",
        ),
    ],
)
def test_a_host_that_cannot_be_used_is_reported_in_one_sentence(tmp_path: Path, script: str, told: str) -> None:
    reach = program(tmp_path / "reach", script)
    options = {"hosts": "a,b", "start": f"{reach} {{host}} {{python}}", "python": sys.executable}

    text = try_out("command", options)[1]
    assert told in text
    assert "\n" not in text


def test_options_that_are_missing_or_machines_that_are_not_there_start_nothing(tmp_path: Path) -> None:
    up = program(tmp_path / "up", f"touch {tmp_path}/started")

    assert try_out("ssh", {}) == (
        False,
        "this pool needs hosts: write --hosts a,b, or hosts = ... in a settings file.",
    )
    assert try_out("kubernetes", {})[1].startswith("this pool needs an image with torch")
    assert try_out("ssh", {"hosts": "a", "up": up, "down": up})[1].startswith("The options fit together.")
    assert not (tmp_path / "started").exists()
    assert try_out("moon", {}) == (False, "there is no pool of the kind 'moon'.")


def test_this_machine_and_another_interpreter(tmp_path: Path) -> None:
    assert try_out("local", {})[1].startswith("This machine has Python ")
    assert "is not a Python interpreter" in try_out("local", {"python": "/bin/true"})[1]
    assert "there is no interpreter at /nowhere" in try_out("local", {"python": "/nowhere"})[1]


def test_slurm_says_when_a_job_would_start() -> None:
    said = "srun: Job 7 to start at 2026-05-01T10:00:00 using 1 processors on nodes n[1-2] in partition gpu\n"

    assert slurm.likely_start(said) == "2026-05-01T10:00:00 on n[1-2] in partition gpu"
    assert slurm.likely_start("srun: something else") == ""
    words = slurm.test_only({"partition": "gpu", "gres": "gpu:1", "salloc": "--mem=4G --exclusive"})
    assert words == [
        "srun",
        "--test-only",
        "--ntasks=1",
        "--partition=gpu",
        "--gres=gpu:1",
        "--mem=4G",
        "--exclusive",
        "true",
    ]


def test_versions_are_found_among_other_output() -> None:
    done = subprocess.run([sys.executable, "-"], input=trial.VERSIONS, capture_output=True, check=True)

    assert (versions(b"Last login: today\r\n" + done.stdout) or ("", ""))[0] == ".".join(map(str, sys.version_info[:3]))
    assert versions(b"0:trial 3.12.1 2.9:") is None


@pytest.mark.slow
def test_a_trial_has_a_process_of_its_own_that_has_the_kernels_packages() -> None:
    _, results = started("local", {})

    ok, text = results.get(timeout=60)
    assert ok
    assert f"with torch {__import__('torch').__version__}" in text


@pytest.mark.slow
def test_a_trial_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "pids")
    reach = program(tmp_path / "reach", f"echo $$ > {fifo}; trap '' TERM; sleep 1000 & wait")
    attempt, results = started("command", {"hosts": "a", "start": f"{reach} {{host}} {{python}}"})

    pid = int(fifo.read_text())
    attempt.end()
    wait_until_gone({pid})
    with pytest.raises(queue.Empty):
        results.get(timeout=0.1)


@pytest.mark.slow
def test_a_trial_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 1.0)
    reach = program(tmp_path / "reach", "sleep 1000")
    _, results = started("command", {"hosts": "a", "start": f"{reach} {{host}} {{python}}"})

    assert results.get(timeout=30) == (False, "No answer came within 1 s.")


@pytest.mark.slow
def test_a_trial_ends_with_its_kernel(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "pids")
    reach = program(tmp_path / "reach", f"echo $$ > {fifo}; sleep 1000")
    code = (
        "import threading; from jupyter_distrib.pools.trial import Trial; "
        f"Trial('command', {{'hosts': 'a', 'start': {reach + ' {host} {python}'!r}}}, print); threading.Event().wait()"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code])
    pid = int(fifo.read_text())
    kernel.kill()
    kernel.wait()
    wait_until_gone({pid})
