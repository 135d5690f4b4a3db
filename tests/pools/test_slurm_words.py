"""What Slurm's words mean."""

from __future__ import annotations

import shlex
import time

import pytest

from jupyter_distrib.pools.slurm import command, report


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
    assert command.ENDED[command.state("17", shown)] == "was preempted by another one"
    assert command.state("1", shown) == command.state("17", "") == ""


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        (True, {}, ["--ntasks=4", "--gpus=4"]),
        (True, {"gres": "gpu:2"}, ["--gres=gpu:2", "--ntasks=4", "--nodes=2", "--ntasks-per-node=2"]),
        (True, {"gres": "gpu:a100:3,license:1"}, ["--ntasks=4", "--nodes=2"]),
        (True, {"nodes": "2"}, ["--ntasks=4", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]),
        (True, {"nodes": "3"}, ["--ntasks=4", "--nodes=3", "--gpus=4"]),
        (False, {"partition": "cpu", "salloc": "--mem=4G"}, ["--partition=cpu", "--mem=4G"]),
    ],
)
def test_what_is_asked_for(gpus: bool, options: dict[str, str], words: list[str]) -> None:
    asked = command.salloc(options, 4, gpus=gpus, name="x")
    assert set(words) <= set(asked)
    assert ("--gpus=4" in asked) == ("--gpus=4" in words)


def test_components_of_a_job_that_ask_for_their_own_gpus_are_not_given_others() -> None:
    for mixed in ("-w n1 --gres=gpu:1 : -w n2 --gres=gpu:2", "--gpus=1 : --ntasks=2 --gpus=2"):
        asked = command.salloc({"salloc": mixed}, 3, gpus=True, name="x")
        assert [word for word in asked if word.startswith("--gpus=3")] == []
    assert "--gpus=3" in command.salloc({"salloc": "--ntasks=1 : --ntasks=2"}, 3, gpus=True, name="x")


JOB = """\
JobId=7 JobName=sh
   JobState=RUNNING Reason=None Dependency=(null)
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-3,07]
   NumNodes=4 NumCPUs=8 NumTasks=8 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:a100:5,gpu:v100:2
     Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:4)
     Nodes=n3 CPU_IDs=0-3 Mem=0 GRES=gpu:1(IDX:0),license:3(CNT:3)
     Nodes=n07 CPU_IDs=0 Mem=0 GRES=
"""


def test_the_nodes_of_a_job_and_its_gpus_there() -> None:
    job = command.Job.of("7", JOB)
    assert (job.state, job.nodes) == ("RUNNING", ("n1", "n2", "n3", "n07"))
    assert job.gpus == {"n1": 3, "n2": 3, "n3": 1}
    assert "--gpus=3" in command.Srun(job="7", python="python3", gpus=job.gpus).words("n1"), "other nodes have fewer"
    even, components = {"n1": 3, "n2": 3}, {"n1": "0", "n2": "0", "n3": "1"}
    assert "--gres=gpu:3" in command.Srun(job="7", python="python3", gpus=even).words("n1")
    for node, count in job.gpus.items():
        srun = command.Srun(job="7", python="python3", gpus=job.gpus, components=components)
        assert f"--gres=gpu:{count}" in srun.words(node)
    assert "--gres" not in " ".join(command.Srun(job="7", python="python3", gpus=job.gpus).words("n07"))
    assert command.Job.of("7", "JobId=7 JobState=PENDING\n   NodeList=(null)\n").nodes == ()


def test_a_job_of_an_array_is_not_the_others() -> None:
    """One of them has the number of the array, and Slurm tells of all when it is asked for that one."""
    other = JOB.replace("JobId=7 ", "JobId=8 ArrayJobId=7 ArrayTaskId=1 ").replace("RUNNING", "FAILED")
    shown = other.replace("n", "m") + "\n" + JOB.replace("JobId=7 ", "JobId=7 ArrayJobId=7 ArrayTaskId=2 ")
    assert command.Job.of("7", shown) == command.Job.of("7", JOB)
    assert command.of_job("7", "8 1:00\n7 2:00\n77 3:00\n") == "2:00"


def test_a_heterogeneous_job_has_the_nodes_of_its_components() -> None:
    shown = (
        "JobId=7 HetJobId=7 HetJobOffset=0 JobName=x\n   JobState=RUNNING\n   NodeList=n[1-2]\n"
        "\nJobId=8 HetJobId=7 HetJobOffset=1 JobName=x\n   JobState=RUNNING\n   NodeList=n2,n3\n"
    )
    job = command.Job.of("7", shown)
    assert job.nodes == ("n1", "n2", "n3")
    assert job.components == {"n1": "0", "n2": "0", "n3": "1"}
    assert "--het-group=1" in command.Srun(job="7", python="python3", components=job.components).words("n3")


@pytest.mark.parametrize(
    ("listed", "is_wanted"),
    [
        ("7 gpu None\n8 gpu Resources\n", True),
        ("7 gpu None\n8 cpu,gpu Priority\n", True),
        ("7 gpu None\n8 cpu Resources\n", False),
        ("7 gpu None\n8 gpu BeginTime\n", False),
        ("7 gpu None\n8 gpu Nodes required for job are DOWN, DRAINED\n", False),
        ("8 gpu Resources\n", False),
    ],
)
def test_only_a_job_for_the_same_partition_waits_for_these_nodes(listed: str, is_wanted: bool) -> None:
    assert command.is_another_queued("7", listed) == is_wanted


def test_an_interpreter_that_a_node_lacks_is_named_though_srun_speaks_last() -> None:
    said = (
        "slurmstepd-n1: error: execve(): /x/python: No such file or directory\n"
        "srun: error: n1: task 0: Exited with exit code 2\n"
    )
    told = command.Srun(job="7", python="/x/python").failure("n1", 2, said)
    assert told.startswith("there is no Python at /x/python on host n1: set python to an interpreter with torch"), told


def test_a_salloc_that_fails_without_a_word_is_said_to() -> None:
    assert command.refusal("\n") == "Slurm refuses these ranks: salloc ended without a word; run it by hand."


def test_an_option_that_salloc_does_not_know_is_named() -> None:
    said = "salloc: unrecognized option '--nonsense'\nTry \"salloc --help\" for more information\n"
    assert command.refusal(said) == "Slurm refuses these ranks: unrecognized option '--nonsense'."
    assert (
        command.refused("srun: option '--mem' requires an argument\nTry it\n") == "option '--mem' requires an argument"
    )


@pytest.mark.parametrize(
    "last",
    [
        "",
        "salloc: Relinquishing job allocation 4\n",
        "salloc: Relinquishing job allocation 4\nsalloc: Job allocation 4 has been revoked.\n",
    ],
)
def test_a_salloc_that_is_told_not_to_hold_its_job_is_no_refusal(last: str) -> None:
    assert command.refusal(f"salloc: Granted job allocation 4\n{last}") == (
        "salloc gave job 4 back at once, without starting what holds it: leave --no-shell, and any command, out of the "
        "option salloc."
    )
    assert command.refusal("salloc: Granted job allocation 4\nsalloc: Job allocation 4 has been revoked.\n") == (
        "Slurm refuses these ranks: salloc: Job allocation 4 has been revoked."
    )


def test_a_controller_that_is_away_is_not_a_refusal() -> None:
    said = "salloc: error: Unable to allocate resources: Unable to contact slurm controller (connect failure)"
    assert command.refusal(said) == (
        "Slurm does not answer (Unable to contact slurm controller): try again when its controller is back."
    )
    expired = command.Srun(job="17", python="python3").failure("n1", 1, "srun: error: Expired or invalid job 17")
    assert expired == "Slurm starts nothing on node n1: job 17 has ended, or Slurm's controller does not answer."


SINFO = """\
n1 mixed~ 3/1/0/4 2048 gpu:a100:4(S:0-1) gpu:a100:3(IDX:0-2)
n1 mixed~ 3/1/0/4 2048 gpu:a100:4(S:0-1) gpu:a100:3(IDX:0-2)
n02 drained* 0/0/4/4 1024 (null) gpu:0
what another version says
"""
JOBS = """\
17|ada|RUNNING|n[1-2,05],n02|train|a
18|bob|PENDING||later
19|bob|RUNNING|n1|eval
"""


def test_nodes_are_reported_with_their_jobs() -> None:
    one, other = report.nodes(SINFO, JOBS.splitlines())
    assert (one.name, one.cpus, one.free_cpus, one.memory_bytes, one.state) == ("n1", 4.0, 1.0, 2 << 30, "")
    assert (one.gpus, one.free_gpus, one.gpu_type) == (4, 1, "a100")
    assert one.holders == ("ada: job 17 (train|a)", "bob: job 19 (eval)")
    assert (other.state, other.free_gpus, other.holders) == ("drained*", 0, ("ada: job 17 (train|a)",))


def test_names_of_nodes() -> None:
    assert [*command.expanded("a[1-2,05],b,c[08-10]-x")] == ["a1", "a2", "a05", "b", "c08-x", "c09-x", "c10-x"]
    assert [*command.expanded("r[1-2]n[1-2]")] == ["r[1-2]n[1-2]"]
    assert [*command.expanded("")] == []


@pytest.mark.parametrize(
    ("after_s", "waiting", "told"),
    [
        (30, 0, "at once, on n1"),
        (3600, 0, "in 60 min at the latest, on n1, as Slurm estimates"),
        (3600, 2, "in 60 min at the latest, on n1, as Slurm estimates; 2 jobs wait"),
    ],
)
def test_when_the_next_rank_could_start(after_s: int, waiting: int, told: str) -> None:
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1_800_000_000 + after_s))
    said = f"sbatch: Job 3 to start at {start} using 1 processors on nodes n1 in partition main"
    assert report.estimate(said, waiting, 1_800_000_000) == told
    assert report.estimate("what another version says", waiting, 1_800_000_000) == ""


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (" (Resources)", ""),
        (" (QOSMaxJobsPerUserLimit)", ""),
        (" (AssocGrpCPURunMinutesLimit)", ""),
        (" (PartitionTimeLimit)", "ask for less, or for another partition"),
        (" (QOSMaxCpuPerJobLimit)", "ask for less, or for another partition"),
        (" (AssocGrpCPUMinutesLimit)", "the account's budget is used up: use another account or qos"),
    ],
)
def test_a_quota_is_waited_for_unless_that_is_of_no_use(reason: str, advice: str) -> None:
    assert command.never(reason) == advice


def test_the_name_of_a_job_adds_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever submits a job chooses its name."""
    name = "x\x1b[2J\n18|root|RUNNING|n[1-2]|free\u202e\x1b[2J\n|19|root|PENDING||free"
    words: list[str] = []

    def output(*asked: str, **_: object) -> str:
        words[:] = [word.removeprefix("--format=") for word in asked if word.startswith("--format=")] or words
        return SINFO if asked[0] == "sinfo" else words[0].replace("%i|%u|%T|%N|%j", f"17|eve|RUNNING|n1|{name}")

    monkeypatch.setattr(report, "output", output)
    monkeypatch.setattr(report, "job_of", lambda job: command.Job(id=job, state="RUNNING", nodes=("n1",), gpus={}))
    one, _ = report.query_nodes({"job": "17"}, lambda _: None).nodes or ()
    assert one.holders == ("eve: job 17 (x [2J)",)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "--exclude=n1,n2"),
        ("--mem=4G -x n7", "--mem=4G --exclude=n1,n2,n7"),
        ("--exclude=n[7-8] --comment='a b'", "--comment='a b' --exclude=n1,n2,n[7-8]"),
        ("-xn7 --exclude n8", "--exclude=n1,n2,n7,n8"),
    ],
)
def test_nodes_are_left_out_beside_those_that_the_user_leaves_out(given: str, told: str) -> None:
    assert shlex.split(command.elsewhere(given, ["n1", "n2"])) == shlex.split(told)
