"""What Slurm's words mean."""

from __future__ import annotations

import pytest

from jupyter_distrib.pools.slurm import command


@pytest.mark.parametrize(
    ("left", "seconds"),
    [
        ("4:05", 245.0),
        ("2:00:00", 7200.0),
        ("1-00:00:01", 86_401.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_the_time_that_is_left(left: str, seconds: float | None) -> None:
    assert command.seconds_left(left) == seconds


def test_the_state_of_a_job() -> None:
    shown = "JobId=17 JobName=x UserId=me(1) Priority=1 JobState=PREEMPTED Reason=None Dependency=(null) Requeue=1"
    assert command.ENDED[command.state(shown)] == "was preempted by another one"
    assert command.state("") == ""


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        (True, {}, ["--gpus=4", "--gpus-per-task=1"]),
        (True, {"gres": "gpu:2"}, ["--gres=gpu:2"]),
        (False, {"partition": "cpu", "salloc": "--mem=4G"}, ["--partition=cpu", "--mem=4G"]),
    ],
)
def test_what_is_asked_for(gpus: bool, options: dict[str, str], words: list[str]) -> None:
    asked = command.salloc(options, 4, gpus=gpus, name="x")
    assert set(words) <= set(asked)
    assert ("--gpus=4" in asked) == ("--gpus=4" in words)


def test_a_controller_that_is_away_is_no_refusal() -> None:
    said = "salloc: error: Unable to allocate resources: Unable to contact slurm controller (connect failure)"
    assert command.refusal(said) == (
        "Slurm does not answer (Unable to contact slurm controller): try again when its controller is back."
    )
    expired = command.Srun(job="17", python="python3").failure("n1", 1, "srun: error: Expired or invalid job 17")
    assert expired == "Slurm starts nothing on node n1: job 17 has ended, or Slurm's controller does not answer."
