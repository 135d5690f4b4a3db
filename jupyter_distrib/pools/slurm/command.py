"""The command lines of Slurm, and the meaning of its messages. Pure. Slurm 22.05."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jupyter_distrib.pools.command import bootstrap, command
from jupyter_distrib.pools.command.hosts import Host

_NEVER = (
    "PartitionNodeLimit",
    "PartitionConfig",
    "PartitionTimeLimit",
    "BadConstraints",
    "InvalidQOS",
    "InvalidAccount",
    "PerJobLimit",
)
"""Parts of reasons that mean that a job will never start."""
_USED_UP = re.compile(r"Grp\w*(?<!Run)Minutes")
"""Part of reasons that mean that a job waits for a new budget of its account."""
_AWAY = ("Unable to contact slurm controller", "Socket timed out on send/recv")
_EXPIRED = "Expired or invalid job"
NO_JOB = "Invalid job id"
_GIVEN_BACK = re.compile(
    r"^salloc: (?:Granted job allocation (\d+)"
    r"|Relinquishing job allocation (\d+)(?:\nsalloc: Job allocation \2 has been revoked\.)?)\n*\Z",
    re.MULTILINE,
)
"""The last words of a salloc that had a job, and did not start the command that was to hold it. What it gives back is
revoked, and it says so if it has not ended by then."""
_COMPLAINT = re.compile(
    r"error: (.*)|^\w+: ((?:unrecognized|invalid) option .*|option .* (?:is ambiguous|requires an argument).*)"
)
"""A line of salloc or srun with a complaint: their own, or that of the C library about an option."""
_JOB_ENDED = (_EXPIRED, NO_JOB, "already completing or completed", "Job credential revoked")
_NAMES = ("partition", "account", "qos", "time", "gres", "constraint")
_HELD = (
    "echo granted $SLURM_JOB_ID $SLURM_JOB_NODELIST $SLURM_TASKS_PER_NODE; cat >/dev/null; "
    'grep -qs "^State:.[^XZ]" /proc/$PPID/status || '
    'for wait in 1 2 4 8 16 32 64; do scancel "$SLURM_JOB_ID" && break; sleep $wait; done'
)
HOLDS = ("sh", "-c", _HELD)
"""The program that holds an allocation as long as its input is open. It gives the nodes back itself if salloc was
killed and cannot."""


_ADDRESSES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables that say where Slurm is, and which user calls it."""


def stray_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables by which a job, or its script, sets options of Slurm's programs. They come from the
    notebook's own job, or are left from another job, and contradict the options given here."""
    stray = re.compile(r"(SLURM|SRUN|SALLOC|SBATCH|SQUEUE|SINFO|SCANCEL|SCONTROL)_")
    return sorted(name for name in environment if stray.match(name) and name not in _ADDRESSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as `scontrol show job --details` describes it."""

    id: str
    state: str
    nodes: tuple[str, ...]
    gpus: Mapping[str, int]
    """The number of its GPUs on each node, for nodes where it has some."""
    components: Mapping[str, str] = field(default_factory=dict)
    """The component of each node of a heterogeneous job, by its number."""

    @classmethod
    def of(cls, id_: str, shown: str) -> Job:
        """Read the description. GPUs of several types are counted together."""
        gpus: dict[str, int] = {}
        components: dict[str, str] = {}
        nodes: list[str] = []
        for part in _parts(id_, shown):
            for names, gres in re.findall(r"^\s*Nodes=(\S+) .*?GRES=(\S*)", part, re.MULTILINE):
                count = _gpus_of(gres)
                gpus |= dict.fromkeys(expanded(names), count) if count else {}
            found = re.search(r"^\s*NodeList=(\S+)", part, re.MULTILINE)
            listed = [*expanded(found[1])] if found and found[1] != "(null)" else []
            nodes += [name for name in listed if name not in nodes]
            if number := re.search(r"\bHetJobOffset=(\d+)", part):
                components = dict.fromkeys(listed, number[1]) | components
        return cls(id=id_, state=state(id_, shown), nodes=tuple(nodes), gpus=gpus, components=components)


def _parts(id_: str, shown: str) -> list[str]:
    """Return the description of this very job from `scontrol show job`: one text, or one for each component of a
    heterogeneous job. The number of an array names all of its jobs, and is the number of one of them, too."""
    parts = re.split(r"^(?=JobId=)", shown, flags=re.MULTILINE)
    return [part for part in parts if re.match(rf"JobId={id_}\b", part) or re.search(rf"\bHetJobId={id_}\b", part)]


def expanded(text: str) -> Iterator[str]:
    """Yield the names of `a[1-2,5],b`; a name of several ranges is yielded as it stands."""
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        match = re.fullmatch(r"([^\[]*)\[([\d,-]+)\]([^\[]*)", name)
        for part in match[2].split(",") if match else ():
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield f"{match[1]}{number:0{len(first)}d}{match[3]}" if match else ""
        if match is None:
            yield name


@dataclass(frozen=True, slots=True, kw_only=True)
class Srun:
    """A step of a job on each of its nodes; see `HostCommand`."""

    job: str
    python: str
    gpus: Mapping[str, int] = field(default_factory=dict)
    """The number of the job's GPUs on each node. A step of one task would get only that task's GPUs."""
    components: Mapping[str, str] = field(default_factory=dict)
    """See `Job`."""
    engine: str = "Slurm"
    kind: str = "slurm"
    shows_its_end: bool = False

    def is_final(self, said: str) -> bool:
        return any(words in said for words in _JOB_ENDED)

    def is_turned_away(self, said: str) -> bool:
        return False

    def words(self, host: str) -> list[str]:
        # Without --unbuffered, bytes stay in srun until a line ends.
        step = ["--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none"]
        step += self._gpus_on(host)
        step += [f"--het-group={self.components[host]}"] if host in self.components else []
        unset = [word for name in stray_variables(os.environ) for word in ("-u", name)]
        srun = ["srun", f"--jobid={self.job}", *step, f"--nodelist={host}", self.python, *bootstrap.WORDS]
        return ["env", *unset, *srun] if unset else srun

    def _gpus_on(self, host: str) -> list[str]:
        """Return the option that gives a step all GPUs of the job on this node. Slurm (22.05) refuses `--gres` on each
        node of a job that has more on some of its nodes than on others."""
        if host not in self.gpus:
            return []
        component = [node for node in self.gpus if self.components.get(node) == self.components.get(host)]
        even = len({self.gpus[node] for node in component}) == 1
        return [f"--gres=gpu:{self.gpus[host]}" if even else f"--gpus={self.gpus[host]}"]

    def failure(self, host: str, status: int | None, said: str) -> str:
        if any(words in said for words in (*_AWAY, _EXPIRED)):
            return (
                f"Slurm starts nothing on node {host}: job {self.job} has ended, or Slurm's controller does not answer."
            )
        shown = f"srun --jobid={self.job} --overlap -w {host}"
        return command.sentence(host, self.python, status, said, tried=f"{shown} {self.python} --version", shown=shown)


def salloc(options: Mapping[str, str], size: int, *, gpus: bool, name: str) -> list[str]:
    """Return the command that holds an allocation for this many ranks, and prints its job and nodes."""
    own = [f"--{key}={options[key]}" for key in _NAMES if key in options]
    more = shlex.split(options.get("salloc", ""))
    return ["salloc", f"--job-name={name}", *own, *_room(options, size, gpus=gpus), *more, *HOLDS]


def elsewhere(salloc: str, nodes: Sequence[str]) -> str:
    """Return further options of salloc that also exclude these nodes: it heeds only the last `--exclude`."""
    names = list(nodes)
    words = iter(shlex.split(salloc))
    others = []
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("-x", "--exclude"):
            names.append(value if equals else next(words, ""))
        elif word.startswith("-x"):
            names.append(word.removeprefix("-x"))
        else:
            others.append(word)
    return shlex.join([*others, f"--exclude={','.join(filter(None, names))}"])


def test_only(options: Mapping[str, str]) -> list[str]:
    """Return the command that asks when a job of one rank would start, and starts none."""
    own = [f"--{key}={options[key]}" for key in _NAMES if key in options]
    return ["srun", "--test-only", "--ntasks=1", *own, *shlex.split(options.get("salloc", "")), "true"]


def likely_start(said: str) -> str:
    """Return when and where a job would start, as `test_only` reports it; empty if the report cannot be read."""
    match = re.search(r"to start at (\S+) .*? on nodes (\S+)(?: in partition (\S+))?", said)
    if match is None:
        return ""
    return f"{match[1]} on {match[2]}" + (f" in partition {match[3]}" if match[3] else "")


def _room(options: Mapping[str, str], size: int, *, gpus: bool) -> list[str]:
    """Return the options for cores and GPUs of this many ranks. GPUs belong to nodes, not to tasks: a step gets those
    of its node."""
    on_each = _gpus_of(options["gres"]) if gpus and "gres" in options else 0
    nodes = int(options["nodes"]) if options.get("nodes", "").isdigit() else -(-size // on_each) if on_each else 0
    asked = [f"--ntasks={size}", *([f"--nodes={nodes or options['nodes']}"] if nodes or "nodes" in options else [])]
    even = nodes > 0 and size % nodes == 0
    asked += [f"--ntasks-per-node={size // nodes}"] if even else []
    own = shlex.split(options.get("salloc", ""))
    by_component = ":" in own and any(word.startswith(("--gres", "--gpus")) for word in own)
    if gpus and "gres" not in options and not by_component:
        asked += [f"--gpus-per-node={size // nodes}" if even else f"--gpus={size}"]
    return asked


def _gpus_of(gres: str) -> int:
    """Return the number of GPUs of each node in `gpu:a100:4,license:1`; 0 if none is given."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))


def granted(line: str) -> tuple[str, str, str] | None:
    """Return job, nodes and tasks per node from the line of salloc; for a heterogeneous job only its number."""
    words = line.split()
    if len(words) not in (2, 4) or words[0] != "granted":
        return None
    return (words[1], words[2], words[3]) if len(words) == 4 else (words[1], "", "")


def job_of(said: str) -> str:
    """Return the job that salloc is waiting for, or an empty string."""
    match = re.search(r"(?:Pending job allocation|job) (\d+)", said)
    return match[1] if match else ""


def tasks(text: str) -> list[int]:
    """Return the tasks of each node from `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    return counts


def hosts(names: list[str], counts: list[int]) -> tuple[Host, ...]:
    """Return the nodes of an allocation with the ranks that each has room for."""
    slots = counts if len(counts) == len(names) else [None] * len(names)
    return tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True))


ENDED = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "has reached its time limit",
    "DEADLINE": "has reached its deadline",
    "PREEMPTED": "was preempted by another one",
    "NODE_FAIL": "has lost a node",
    "OUT_OF_MEMORY": "has used more memory than it may",
    "COMPLETED": "has ended",
    "FAILED": "has failed",
    "PENDING": "was taken from its nodes and is queued again",
    "REQUEUED": "was taken from its nodes and is queued again",
    "REQUEUE_HOLD": "was taken from its nodes and is held in the queue",
    "BOOT_FAIL": "could not start its nodes",
    "REVOKED": "was started on another cluster",
}
"""The meaning of the states of jobs that have no nodes any more."""
QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED")
"""States of jobs that get their nodes later."""


def state(job: str, shown: str) -> str:
    """Return the state of a job from `scontrol show job`: `RUNNING`, `TIMEOUT` ..."""
    match = re.search(r"\bJobState=([A-Z_]+)", "".join(_parts(job, shown)[:1]))
    return match[1] if match else ""


def of_job(job: str, listed: str) -> str:
    """Return a job's words from squeue's lines, which begin with the number of a job: those of an array and of a
    heterogeneous job come together. Empty if there are none."""
    rows = [line.split(maxsplit=1) for line in listed.splitlines()]
    return next((row[1] for row in rows if len(row) == 2 and row[0] == job), "")


def seconds_left(text: str) -> float | None:
    """Return the seconds of `1-02:03:04`, squeue's format for the time left; None if there is no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def never(reason: str) -> str:
    """Return advice on a job that will never start, by Slurm's reason; empty if waiting makes sense."""
    if _USED_UP.search(reason):
        return "the account's budget is used up: use another account or qos"
    return "ask for less, or for another partition" if any(part in reason for part in _NEVER) else ""


def is_another_queued(job: str, listed: str) -> bool:
    """Return whether a job waits for nodes of this job's partition, by lines of job, partitions and reason."""
    rows = [line.split(maxsplit=2) for line in listed.splitlines() if line.count(" ") > 1]
    own = {name for number, names, _ in rows if number == job for name in names.split(",")}
    return any(own & set(names.split(",")) and reason in ("Resources", "Priority") for _, names, reason in rows)


def has_answered(said: str) -> bool:
    """Return whether Slurm has answered a salloc: it has a job, or was refused one."""
    return bool(job_of(said) or "error: " in said) and not any(words in said for words in _AWAY)


def refusal(said: str) -> str:
    """Return a sentence on a salloc that ended without nodes."""
    for words in _AWAY:
        if words in said:
            return f"Slurm does not answer ({words}): try again when its controller is back."
    if held := _GIVEN_BACK.search(said):
        return (
            f"salloc gave job {held[1] or held[2]} back at once, without starting what holds it: leave --no-shell, and "
            "any command, out of the option salloc."
        )
    complaint = refused(said).rstrip(".") or "salloc ended without a word; run it by hand"
    return f"Slurm refuses these ranks: {complaint}."


def refused(said: str) -> str:
    """Return salloc's complaint about options that it does not accept."""
    complaints = (_COMPLAINT.search(line) for line in said.splitlines())
    lines = [match[1] or match[2] for match in complaints if match]
    return "; ".join(dict.fromkeys(filter(None, lines))) or command.last_line(said)
