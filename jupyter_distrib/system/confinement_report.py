"""Describes what confines a process: its container, its job and its control group, with the limits of that group. Any
process; `confinement.py` compares processes instead."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.system import confinement, control_groups
from jupyter_distrib.system.confinement import ProcessPlace
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import size

_PROC, _MOUNT = Path("/proc"), Path("/sys/fs/cgroup")
_CONTAINERS = (
    ("APPTAINER_CONTAINER", "Apptainer"),
    ("SINGULARITY_CONTAINER", "Singularity"),
    ("ENROOT_ROOTFS", "Enroot"),
    ("CH_RUNNING", "Charliecloud"),
    ("SHIFTER_IMAGE", "Shifter"),
    ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
)
"""Variables that reveal a container, and its kind."""
_MARKS = (("run/.containerenv", "Podman"), (".dockerenv", "Docker"), (".singularity.d", "Apptainer"))
"""Files in a container's root folder that reveal its kind."""
_GROUP_OF_CONTAINER = re.compile(
    r"/(?P<kind>docker|libpod|crio|cri-containerd|containerd|lxc\.payload|lxc)[-/.](?P<name>[\w.-]+?)(?:\.scope)?(?:/|$)"
)
_KINDS = {"docker": "Docker", "libpod": "Podman", "crio": "CRI-O", "lxc": "LXC", "lxc.payload": "LXC"}
_NAMES = {
    "cgroup": "view of control groups",
    "ipc": "shared memory of System V",
    "mnt": "files",
    "net": "network",
    "pid": "processes",
    "time": "clock",
    "user": "users",
    "uts": "host name",
}
"""Descriptions of what the processes of a namespace share."""


@data_class
class ConfinementReport:
    """Container, job, control group and limits of one process."""

    place: ProcessPlace
    container: str
    """The kind of its container, with its name if that is known; empty outside of containers."""
    job: str
    group: str
    """Its control group, for memory if each controller has its own; empty if it is in none."""
    memory_bytes: int
    """Memory limit of its groups; 0 without a limit."""
    cores: int

    @classmethod
    def of(cls, pid: int | None = None, proc: Path = _PROC, mount: Path = _MOUNT) -> ConfinementReport:
        """Return the report on a process of this user; by default, this process. Raises `OSError` if there is none."""
        which: int | str = "self" if pid is None else pid
        if pid is not None:
            os.stat(proc / str(pid))
        variables = os.environ if pid is None else confinement.environment(pid, proc)
        groups = {name: path for names, path in control_groups.memberships(proc, which) for name in names.split(",")}
        group = next((groups[each] for each in ("memory", "", "cpu") if groups.get(each, "/") != "/"), "")
        place = confinement.place(pid, proc, mount)
        return cls(
            place=place,
            container=_container(variables, group, proc / str(which) / "root"),
            job=_job(place.job),
            group=_printable(group),
            memory_bytes=control_groups.memory_limit_bytes(proc, mount, which),
            cores=control_groups.cores(proc, mount, which),
        )

    def __str__(self) -> str:
        where = [self.container or "no container", self.job, f"control group {self.group}" if self.group else ""]
        memory = f"at most {size(self.memory_bytes)} of memory" if self.memory_bytes else "no limit of memory"
        return ", ".join([*filter(None, where), memory, f"{self.cores} core{'s' * (self.cores != 1)}"])

    def differences(self, other: ConfinementReport) -> list[str]:
        """Return a few words on each thing that another process does not share with this one."""
        pairs = zip(confinement.NAMESPACES, self.place.namespaces, other.place.namespaces, strict=True)
        found = [_NAMES[name] for name, own, its in pairs if own and its and own != its]
        own, its = self.place, other.place
        found += ["root folder"] * (bool(own.root and its.root) and own.root != its.root and "files" not in found)
        found += ["job"] * (self.job != other.job)
        found += ["control group"] * (own.groups != its.groups)
        return found


def where() -> str:
    """Return the machine of this process, with its container, job and control group: `n1, Slurm job 17`."""
    here = ConfinementReport.of()
    group = f"control group {here.group}" if here.group else ""
    return ", ".join(filter(None, [platform.node(), here.container, here.job, group]))


def describe() -> str:
    """Return the machine of this process and its confinement, with the limits."""
    return f"{platform.node()}: {ConfinementReport.of()}"


def _job(words: tuple[str, ...]) -> str:
    return " ".join([words[0], "job", *filter(None, words[1:])]) if words else ""


def _container(variables: Mapping[str, str], group: str, root: Path) -> str:
    """Return the kind of a container and its name, by its variables, its files or its group; empty if there is none."""
    kinds = [kind for name, kind in _CONTAINERS if name in variables]
    with suppress(OSError):
        kinds += [kind for name, kind in _MARKS if (root / name).exists()]
    found = _GROUP_OF_CONTAINER.search(group)
    if found is not None:
        kinds.append(_KINDS.get(found["kind"], "containerd"))
    elif "kubepods" in group:
        kinds.append("Kubernetes")
    if declared := variables.get("container", ""):
        kinds.append(declared)
    return " ".join(_printable(word) for word in (*kinds[:1], "container", *_name(variables, found)) if kinds)


def _name(variables: Mapping[str, str], found: re.Match[str] | None) -> Iterator[str]:
    image = variables.get("APPTAINER_CONTAINER") or variables.get("SINGULARITY_CONTAINER")
    if image:
        yield image
    elif "KUBERNETES_SERVICE_HOST" in variables and variables.get("HOSTNAME"):
        yield variables["HOSTNAME"]
    elif found is not None:
        yield found["name"][:12]


def _printable(text: str) -> str:
    """Return the text without terminal control characters, shortened if need be."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
