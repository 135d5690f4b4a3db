"""Determines what confines a process: its namespaces, control groups, job and rights. Two notebooks share an agent only
where these are the same, since the ranks of an agent are confined as it is. Any process; `%load_ext` waits for it.

Not everything that two sessions differ in confines them. Each login and each terminal of a desktop has a scope of
systemd, which exists for accounting: such a scope matters only if it has limits. A job of a scheduler matters
without a limit, too, because its end ends the processes in it, and because its use is accounted for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.system import control_groups
from jupyter_distrib.system.data_class import data_class

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
JOBS = {
    "Slurm": ("SLURM_JOB_ID",),
    "PBS": ("PBS_JOBID",),
    "LSF": ("LSB_JOBID", "LSB_JOBINDEX"),
    "Grid Engine": ("SGE_TASK_ID", "JOB_ID"),
    "Flux": ("FLUX_JOB_ID",),
    "OAR": ("OAR_JOB_ID",),
    "HTCondor": ("_CONDOR_SCRATCH_DIR",),
    "PJM": ("PJM_JOBID", "PJM_BULKID"),
    "Cobalt": ("COBALT_JOBID",),
}
"""The variables by which schedulers name a job; a scheduler is known by its first one. A step of a job has a control
group, or its end leaves an agent alone."""
_PROC, _MOUNT = Path("/proc"), Path("/sys/fs/cgroup")
_OWN = "self"
_RIGHTS = re.compile(r"^(?:NoNewPrivs|Seccomp|Seccomp_filters|Cap\w+|Mems_allowed_list):.*$", re.MULTILINE)
"""Lines of /proc/PID/status, proc_pid_status(5), on rights that a sandbox removes."""
_WAKE_ALARM = 1 << 35
_LOGIN = re.compile(r"/user\.slice/user-\d+\.slice/(?:.*/)?(?:[^/]+\.(?:scope|slice)|user@\d+\.service)", re.DOTALL)
"""Groups of systemd that logins and terminals have (systemd.special(7)); a service below them is not such a group."""
_LIMITS = (
    "cpu.cfs_quota_us",
    "cpu.max",
    "devices.list",
    "io.max",
    "memory.high",
    "memory.limit_in_bytes",
    "memory.max",
    "memory.swap.max",
)
"""Files with a limit. Not among them: pids.max, which systemd writes for every scope."""
_UNLIMITED = re.compile(r"(?:max(?: \d+)?|-1|a \*:\* rwm|[89]\d{18}|)")


@data_class
class ProcessPlace:
    """The confinement of a process, as far as another process of the same user can read it; unreadable parts are
    empty."""

    namespaces: tuple[str, ...]
    root: tuple[int, ...]
    groups: tuple[str, ...]
    job: tuple[str, ...]

    def differs(self, other: ProcessPlace) -> bool:
        """Return whether two processes are known to be confined differently."""
        pairs = [*zip(self.namespaces, other.namespaces, strict=True), (self.root, other.root)]
        return any(a and b and a != b for a, b in [*pairs, (self.groups, other.groups)]) or self.job != other.job


def identity() -> tuple[object, ...]:
    """Return everything that confines this process, for comparison with others."""
    ids = os.getuid(), os.geteuid(), os.getgid(), os.getegid(), sorted(os.getgroups())
    return place(), ids, rights()


def rights(proc: Path = _PROC) -> tuple[str, ...]:
    """Return the rights that a sandbox has left to this process."""
    own = proc / _OWN
    label = _text(own / "attr" / "current").strip("\0\n")
    found = (_without_alarm(line) for line in _RIGHTS.findall(_text(own / "status")))
    return *found, "" if label == "unconfined" or label.endswith(" (unconfined)") else label


def _without_alarm(line: str) -> str:
    """Return a line without CAP_WAKE_ALARM, which systemd gives to some logins of a user and not to others."""
    name, _, value = line.partition(":\t")
    is_set = name.startswith("Cap") and re.fullmatch(r"[0-9a-f]+", value)
    return f"{name}:{int(value, 16) & ~_WAKE_ALARM:x}" if is_set else line


def place(pid: int | None = None, proc: Path = _PROC, mount: Path = _MOUNT) -> ProcessPlace:
    """Return the place of a process; by default, of this one."""
    own = proc / (_OWN if pid is None else str(pid))
    return ProcessPlace(
        namespaces=tuple(_link(own / "ns" / name) for name in NAMESPACES),
        root=_root(own),
        groups=tuple(
            f"{names}:{_binding(names, path, mount)}" for names, path in control_groups.memberships(proc, own.name)
        ),
        job=job(job_variables(proc) if pid is None else environment(pid, proc)),
    )


def is_here(pid: int | None) -> bool:
    """Return whether a process is confined like this one, as far as that can be determined.

    Args:
        pid: The process; 0 if it is not visible, None if the system does not tell which it is.
    """
    if pid is None:
        return True
    return pid != 0 and (not environment(pid) or not place(pid).differs(place()))


class Companion:
    """Checks whether another process is still confined like this one. Either may be moved into another control group at
    any time; namespaces do not change so.

    Args:
        pid: The process. If it is not here now, the system puts it elsewhere, and would do so with any other
            process: then it counts as being here.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._groups = pid, control_groups.membership_text()
        self._counts = is_here(pid)
        self._is_away = False

    def is_here(self, *, surely: bool = False) -> bool:
        """Return whether it is still confined like this process. Reads one small file, unless this process was moved or
        `surely` requires more."""
        groups = control_groups.membership_text()
        if self._counts and (surely or self._is_away or groups != self._groups):
            self._is_away = not is_here(self._pid)
            if not self._is_away:
                self._groups = groups
        return not self._is_away


def job(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a scheduler, its job and the part of the job that these variables name; empty without a job."""
    for scheduler, names in JOBS.items():
        if variables.get(names[0]):
            return (scheduler, *(variables.get(name, "") for name in names))
    return ()


def job_variables(proc: Path = _PROC) -> dict[str, str]:
    """Return the variables that name the job of this process, for another process that is to be recognized as part of
    it.

    Notebooks remove them, so that a library does not take them for a step of the job; that does not end the job.
    """
    began = environment(_OWN, proc)
    variables = began if job(began) else os.environ
    return {name: variables[name] for names in JOBS.values() for name in names if name in variables}


def environment(pid: int | str, proc: Path = _PROC) -> dict[str, str]:
    """Return the environment that a process was exec'd with; empty if it cannot be read."""
    entries = _text(proc / str(pid) / "environ").split("\0")
    return {name: value for name, found, value in (entry.partition("=") for entry in entries) if found}


def pid_namespace(pid: int | str = _OWN) -> str:
    """Return the namespace in which the id of a process, and the time of its start, mean the same as for others in it;
    empty where the system has none, or does not tell.

    The system shows the start of each process in the time namespace of the reader, time_namespaces(7).
    """
    found = [_link(_PROC / str(pid) / "ns" / name) for name in ("pid", "time")]
    return " ".join(filter(None, found))


def _binding(names: str, path: str, mount: Path) -> str:
    """Return the innermost of this group and the groups above it that matters: a group that does not belong to a
    login or a terminal, or that has a limit."""
    while _LOGIN.fullmatch(path) and not _is_limited(names, path, mount):
        path = path.rpartition("/")[0]
    return path


def _is_limited(names: str, path: str, mount: Path) -> bool:
    """Return whether a group has a limit of its own; one that is not visible may have one."""
    if names.startswith("name="):
        return False
    folders = [control_groups.folder_of(each, path, mount) for each in (*names.split(","), *["unified"] * (not names))]
    known = [folder for folder in folders if folder is not None]
    texts = [_text(folder / name).strip() for folder in known for name in _LIMITS]
    return not known or not all(map(_UNLIMITED.fullmatch, texts))


def _root(own: Path) -> tuple[int, ...]:
    try:
        info = os.stat("/" if own.name == _OWN else own / "root")
    except OSError:
        return ()
    return info.st_dev, info.st_ino


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", "surrogateescape")
    return ""
