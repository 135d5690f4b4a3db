"""Asks Slurm for nodes, and holds them as long as they are used. Blocks, in the thread of `acquire`.

A frozen or slow controller may get a request after its salloc was given up, and start a job for it. So each request
has its own job name to cancel it by, kept in a file until it is certain that no job has that name. The next
coordinator on this machine cancels the jobs of any remaining names.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import select
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command.hosts import Host
from jupyter_distrib.pools.slurm import command
from jupyter_distrib.system import paths, process, record_file
from jupyter_distrib.system.launch import new_log

AT_ONCE_S = 10.0
"""Seconds to wait for free nodes to be granted, for commands that do not wait."""
LOOK_S = 2.0
ANSWER_S = 20.0
ENDING_S = 5.0
SETTLE_S = 1.0
"""Maximum seconds to wait for Slurm to report how a job ended."""
LOOK_AGAIN_S = 0.1
AGAIN_S = 5.0
LARGEST_BYTES = 10_000
LATEST_S = 60.0
"""Seconds for which a request may still arrive when the controller answers again; Slurm's messages time out sooner."""
_REQUEST_NAME = re.compile(r"[^\0]+ [0-9a-f]{8}")
"""The name of a request, which ends in a random number: nothing else is cancelled."""


class Allocation:
    """One job of Slurm, which ends with this process."""

    def __init__(self, options: Mapping[str, str], say: Callable[[str], None], given_up: threading.Event) -> None:
        self._options, self._say, self._given_up = options, say, given_up
        self._process: subprocess.Popen[bytes] | None = None
        self._log = new_log()
        self._said = ""
        self._granted = False
        self._request: Request | None = None

    def obtain(self, size: int, *, gpus: bool, wait_s: float, title: str) -> tuple[command.Job, tuple[Host, ...]]:
        """Wait for nodes for this many ranks; return the job and its nodes. Raises `PoolError`."""
        self._request = Request(title)
        words = command.salloc(self._options, size, gpus=gpus, name=self._request.name)
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(
            words, env=environment(), stdin=pipe, stdout=pipe, stderr=self._log, start_new_session=True
        )
        until_s = time.monotonic() + max(wait_s, AT_ONCE_S)
        while (found := self._line(process)) is None:
            if process.poll() is not None:
                raise PoolError(command.refusal(self._heard()))
            job = command.job_of(self._heard())
            reason = _reason(job) if job else ""
            text = f"job {job} is queued in Slurm{reason}." if job else "Slurm was asked for nodes and does not answer."
            if advice := command.never(reason):
                raise PoolError(f"Slurm will never start job {job}{reason}: {advice}.")
            if time.monotonic() > until_s:
                raise PoolError(f"{text} Wait for it with --wait S.")
            if text != self._said and job:
                self._said = text
                self._say(text)
        self._granted = True
        job, nodes, counts = found
        if (gpus or not nodes) and ((held := job_of(job)).gpus or not nodes):
            return held, command.hosts(list(held.nodes), self._spread(held, size, nodes, counts))
        hosts = command.hosts(node_names(nodes), command.tasks(counts))
        return command.Job(id=job, state="RUNNING", nodes=tuple(host.name for host in hosts), gpus={}), hosts

    def _spread(self, held: command.Job, size: int, nodes: str, counts: str) -> list[int]:
        """Return the number of ranks for each node that has GPUs; empty if its GPUs or cores decide. With a number of
        nodes it is that of Slurm's tasks, since nodes that are given as a whole have more GPUs than were asked for."""
        if not nodes or "nodes" not in self._options:
            return []
        tasks = dict(zip(node_names(nodes), command.tasks(counts), strict=False))
        spread = [min(tasks.get(node, 0), held.gpus.get(node, 0)) for node in held.nodes]
        return spread if sum(spread) >= size and all(spread) else []

    def _line(self, process: subprocess.Popen[bytes]) -> tuple[str, str, str] | None:
        """Return the line of salloc on the grant, or None after a while."""
        assert process.stdout is not None
        until_s = time.monotonic() + LOOK_S
        while time.monotonic() < until_s:
            if self._given_up.is_set():
                raise PoolError("the request was cancelled before the ranks started.")
            if select.select([process.stdout], [], [], 0.2)[0]:
                return command.granted(process.stdout.readline().decode())
        return None

    def _heard(self) -> str:
        return os.pread(self._log.fileno(), 1 << 16, 0).decode("utf-8", "replace")

    def release(self) -> None:
        """Give the nodes back, or stop asking for them."""
        if (process := self._process) is None:
            return
        self._process = None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()  # this ends the program in the allocation, if there is one
        if not self._granted:
            process.terminate()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
                break
            process.send_signal(number)
        process.wait()
        process.stdout.close()
        if self._request is not None:
            self._request.finish(certain=self._granted or command.has_answered(self._heard()))


def node_names(nodes: str) -> list[str]:
    """Return the names of `n[1-3]`. Raises `PoolError`."""
    return output("scontrol", "show", "hostnames", nodes).split()


def job_of(number: str) -> command.Job:
    """Return a job, with its nodes and GPUs. Raises `PoolError`."""
    return command.Job.of(number, output("scontrol", "show", "job", "--details", number))


def notebooks_job(number: str, wait_s: float, say: Callable[[str], None], given_up: threading.Event) -> command.Job:
    """Return the job that `SLURM_JOB_ID` says this notebook is in; a requeued job when it has nodes again.

    Raises:
        PoolError: The job has ended, or does not exist, so that the variable is left from an earlier job, or is
            still queued after this many seconds.
    """
    advice = 'to get nodes of your own, run `del os.environ["SLURM_JOB_ID"]` and the cell again.'
    until_s, ending_until_s, said = time.monotonic() + wait_s, time.monotonic() + AT_ONCE_S, ""
    while True:
        try:
            job = job_of(number)
        except PoolError as error:
            if command.NO_JOB not in str(error):
                raise
            raise PoolError(f"SLURM_JOB_ID names job {number}, which Slurm does not know any more: {advice}") from None
        now_s = time.monotonic()
        if job.state == "RUNNING" or (job.state == "COMPLETING" and now_s > ending_until_s):
            return job
        if job.state not in (*command.QUEUED, "COMPLETING"):
            what = command.ENDED.get(job.state, f"is {job.state}")
            raise PoolError(f"SLURM_JOB_ID names job {number}, which {what}: {advice}")
        if job.state in command.QUEUED:
            text = f"job {number}, which SLURM_JOB_ID names, is queued in Slurm{_reason(number)}"
            if now_s > until_s:
                raise PoolError(f"{text}: wait for it with --wait S or, {advice}")
            if text != said:
                said = text
                say(f"{text}.")
        if given_up.wait(LOOK_S if job.state in command.QUEUED else LOOK_AGAIN_S):
            raise PoolError("the request was cancelled before the ranks started.")


def would_start(options: Mapping[str, str]) -> str:
    """Return a sentence on when Slurm would start a job of one rank with these options. Raises `PoolError`."""
    try:
        words = command.test_only(options)
        done = subprocess.run(words, env=environment(), capture_output=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PoolError(f"Slurm does not answer ({error}): try again when its controller is back.") from None
    said = done.stderr.decode("utf-8", "replace")
    if done.returncode:
        raise PoolError(command.refusal(said))
    when = command.likely_start(said)
    return (
        f"Slurm takes these options: a job of one rank would start at {when}." if when else "Slurm takes these options."
    )


def environment() -> dict[str, str]:
    """Return the variables for Slurm's programs."""
    stray = set(command.stray_variables(os.environ))
    return {name: value for name, value in os.environ.items() if name not in stray}


def seconds_left(job: str) -> float | None:
    """Return how long a job may still last; None if there is no limit, or Slurm does not answer."""
    with suppress(PoolError):
        listed = output("squeue", "--noheader", f"--jobs={job}", "--format=%A %L")
        return command.seconds_left(command.of_job(job, listed))
    return None


def end_of(job: str) -> str:
    """Return how a job has ended, by Slurm's own state: `job 17 was preempted by another one`; empty if it goes on,
    or if Slurm does not answer soon. Blocks for a moment."""
    until_s = time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        try:
            state = command.state(job, output("scontrol", "show", "job", "--oneliner", job, limit_s=SETTLE_S))
        except PoolError as error:
            return f"job {job} has ended" if command.NO_JOB in str(error) else ""
        if state not in ("COMPLETING", "RUNNING"):
            return f"job {job} {command.ENDED[state]}" if state in command.ENDED else ""
        time.sleep(LOOK_AGAIN_S)
    return ""


def is_another_queued(job: str) -> bool:
    """Return whether another job of this user waits for nodes of this job's partition."""
    with suppress(PoolError):
        listed = output(
            "squeue", "--noheader", f"--user={os.getuid()}", "--states=PENDING,RUNNING", "--format=%A %P %r"
        )
        return command.is_another_queued(job, listed)
    return False


def _reason(job: str) -> str:
    """Return why a job waits, and until when, as far as Slurm says."""
    with suppress(PoolError):
        listed = output("squeue", "--noheader", f"--jobs={job}", "--format=%A %r|%S")
        reason, _, start = command.of_job(job, listed).strip().partition("|")
        expected = f", expected start {start}" if start not in ("", "N/A") else ""
        return f" ({reason}{expected})" if reason and reason != "None" else ""
    return ""


def output(*words: str, limit_s: float = ANSWER_S, says: bool = False) -> str:
    """Return the output of a command of Slurm; with `says`, also its messages. Raises `PoolError`."""
    try:
        done = subprocess.run(
            words, env=environment(), capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise PoolError(f"Slurm does not answer ({words[0]}): try again when its controller is back.") from None
    except OSError as error:
        raise PoolError(f"{words[0]} cannot be started ({process.why_not_started(words[0], error)}).") from None
    if done.returncode:
        raise PoolError(f"{words[0]} failed: {command.refused(done.stderr)}.")
    return done.stderr if says else done.stdout


class Request:
    """One request, from just before it is sent until no job has its name. Its file is locked by the process that has
    it, so that others know that it is abandoned when that process has ended."""

    def __init__(self, title: str) -> None:
        self.name = f"{title} {secrets.token_hex(4)}"
        self._path = _folder() / secrets.token_hex(8)
        self._file = paths.opened(self._path)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(f"{_cluster()}\n{self.name}\n".encode())
        self._file.flush()

    def finish(self, *, certain: bool) -> None:
        """End the request: no job of this name is needed any more.

        Args:
            certain: Whether Slurm has answered, so that nothing can arrive later.
        """
        threading.Thread(target=self._cancel, args=(certain,), name="jupyter_distrib-cancel", daemon=True).start()

    def _cancel(self, certain: bool) -> None:
        """Cancel until nothing can arrive any more; if this process ends before that, the next coordinator
        continues."""
        until_s = None
        while until_s is None or time.monotonic() < until_s:
            if not cancel(self.name):
                until_s = None
            elif certain:
                break
            elif until_s is None:
                until_s = time.monotonic() + LATEST_S
            time.sleep(AGAIN_S)
        self._path.unlink(missing_ok=True)
        self._file.close()


def cancel_left() -> None:
    """Cancel the jobs of requests whose process has ended, as far as Slurm answers."""
    for path in _folder().iterdir():
        with suppress(OSError), record_file.opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = file.read(LARGEST_BYTES).decode("utf-8", "replace").splitlines()
            if (
                len(lines) == 2
                and _REQUEST_NAME.fullmatch(name := lines[1])
                and lines[0] == _cluster()
                and cancel(name)
            ):
                path.unlink()


def cancel(name: str) -> bool:
    """Cancel all jobs of this name; return whether Slurm has answered."""
    words = ["scancel", f"--user={os.getuid()}", f"--name={name}"]
    with suppress(subprocess.TimeoutExpired, OSError):
        done = subprocess.run(words, env=environment(), capture_output=True, timeout=ANSWER_S, check=False)
        return not done.returncode
    return False


def _folder() -> Path:
    folder = paths.runtime_directory() / "slurm-requests"
    paths.clear(folder, stat.S_IFDIR)
    return paths.private(folder)


def _cluster() -> str:
    """Return a text that identifies the cluster: its configuration."""
    return os.environ.get("SLURM_CONF", "")
