"""Reports Slurm's nodes, the jobs on them, and when the next rank could start. Blocks, in a thread of its own. Written
for Slurm 22.05; lines that a newer version writes differently are skipped."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping

from jupyter_distrib.coordinator.node_report import NodeReport, OnReport
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.slurm import command
from jupyter_distrib.pools.slurm.allocation import job_of, output
from jupyter_distrib.system import outside_text
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.wire import messages as m

FRESH_S = 15.0
"""Seconds for which a report is reused, because many others ask the controller too."""
ANSWER_S = 5.0
SOON_S = 60.0
"""Seconds until an estimated start below which the nodes count as free: Slurm plans in whole minutes."""
_NODES = ("NodeList:128", "StateLong:32", "CPUsState:32", "Memory:16", "Gres:256", "GresUsed:256")
_JOBS = "%i|%u|%T|%N|%j"
"""The job's name comes last, since the submitter of a job chooses it, perhaps with line ends and bars in it. For the
same reason each line begins with a word that nobody else knows."""
_USABLE = ("idle", "mixed", "allocated", "completing", "planned", "reserved")
_MOST = 3
"""Maximum number of jobs listed for one node."""


def query_nodes(options: Mapping[str, str], on_report: OnReport) -> NodeReport:
    """Return the report for a pool with these options. Raises `PoolError`."""
    own = [f"--partition={options['partition']}"] if "partition" in options else []
    inside = [f"--nodes={','.join(job_of(options['job']).nodes)}"] if options.get("job") else []
    shown = output("sinfo", "--Node", "--noheader", f"--Format={','.join(_NODES)}", *own, *inside, limit_s=ANSWER_S)
    mark = secrets.token_hex(8)
    said = output("squeue", "--noheader", f"--format={mark}|{_JOBS}", *own, limit_s=ANSWER_S)
    jobs = [line.removeprefix(f"{mark}|") for line in said.split("\n") if line.startswith(f"{mark}|")]
    found = nodes(shown, jobs)
    on_report(NodeReport(nodes=found))
    if job := options.get("job"):
        return NodeReport(nodes=found, next_rank=f"at once, in job {job}")
    waiting = sum(line.split("|")[2:3] == ["PENDING"] for line in jobs)
    return NodeReport(nodes=found, next_rank=_next_rank(options, waiting, gpus=any(node.gpus for node in found)))


def nodes(shown: str, jobs: Iterable[str]) -> tuple[m.NodeStatus, ...]:
    """Return the status of each node from what sinfo shows, and squeue's lines."""
    holders: dict[str, list[str]] = {}
    for job, user, state, on, name in (line.split("|", 4) for line in jobs if line.count("|") >= 4):
        for node in command.expanded(on) if state in ("RUNNING", "COMPLETING") else ():
            holders.setdefault(node, []).append(f"{user}: job {job} ({outside_text.shown(name, 60)})")
    found = {status.name: status for line in shown.splitlines() if (status := _node(line.split(), holders))}
    return tuple(found.values())  # a node is shown once for each of its partitions


def _node(words: list[str], holders: Mapping[str, list[str]]) -> m.NodeStatus | None:
    if len(words) < 6 or not re.fullmatch(r"\d+/\d+/\d+/\d+", words[2]):
        return None
    name, state, cpus, memory_mb, gres, used = words[:6]
    idle, total = int(cpus.split("/")[1]), int(cpus.split("/")[3])
    usable = state.rstrip("*~#!%$@^-+").lower() in _USABLE
    gpus, kinds = _gpus(gres)
    jobs = holders.get(name, [])
    more = (f"{len(jobs) - _MOST} more jobs",) if len(jobs) > _MOST else ()
    return m.NodeStatus(
        name=name,
        cpus=float(total),
        free_cpus=float(idle),
        memory_bytes=int(memory_mb) << 20 if memory_mb.isdecimal() else 0,
        gpus=gpus,
        free_gpus=gpus - _gpus(used)[0] if usable else 0,
        gpu_type=kinds,
        state="" if usable else state,
        holders=(*jobs[:_MOST], *more),
    )


def _gpus(gres: str) -> tuple[int, str]:
    """Return number and types of the GPUs in `gpu:a100:4(S:0-1),gpu:2`."""
    found = re.findall(r"\bgpu:(?:([\w.-]+):)?(\d+)\b", gres)
    return sum(int(count) for _, count in found), ", ".join(dict.fromkeys(kind for kind, _ in found if kind))


def _next_rank(options: Mapping[str, str], waiting: int, *, gpus: bool) -> str:
    """Return Slurm's own estimate for one rank."""
    asked = command.salloc({**options, "nodes": "1"}, 1, gpus=gpus, name="")
    words = [word for word in asked[1 : -len(command.HOLDS)] if not word.startswith("--job-name")]
    try:
        said = output("sbatch", "--test-only", *words, "--wrap=true", limit_s=ANSWER_S, says=True)
    except PoolError as error:
        return f"is refused: {error}"
    return estimate(said, waiting, time.time())


def estimate(said: str, waiting: int, now_s: float) -> str:
    """Summarize the output of `sbatch --test-only`: `at once, on n1`."""
    match = re.search(r"to start at (\S+) using .* on nodes (\S+)", said)
    if match is None:
        return ""
    left_s = time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) - now_s
    if left_s <= SOON_S:
        return f"at once, on {match[2]}"
    queue = f"; {waiting} job{'s wait' if waiting > 1 else ' waits'}" if waiting else ""
    return f"in {duration(left_s)} at the latest, on {match[2]}, as Slurm estimates{queue}"
