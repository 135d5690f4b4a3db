"""What confines a process, by files as systems write them, and by real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.system import confinement
from jupyter_distrib.system.confinement_report import ConfinementReport

Files = dict[str, str]
USER = "/user.slice/user-1000.slice"
TERMINAL = f"{USER}/user@1000.service/app.slice/app-terminal.slice/vte-spawn-1.scope"
JOB = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"


def write(folder: Path, files: Files) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder / "proc", folder / "mount"


def groups(folder: Path, files: Files) -> tuple[str, ...]:
    return confinement.place(None, *write(folder, files)).groups


@pytest.mark.parametrize(
    ("path", "limits", "counts"),
    [
        (TERMINAL, {"memory.max": "max\n", "cpu.max": "max 100000\n", "pids.max": "9000\n", "io.max": ""}, USER),
        (f"{USER}/session-3.scope", {"memory.max": "max\n"}, USER),
        (TERMINAL, {"memory.max": "900\n"}, TERMINAL),
        (TERMINAL, {"memory.high": "900\n"}, TERMINAL),
        (TERMINAL, {"cpu.max": "50000 100000\n"}, TERMINAL),
        (f"{USER}/user@1000.service/app.slice/train.service", {"memory.max": "max\n"}, None),
        ("/system.slice/jupyter-ada.service", {"memory.max": "max\n"}, None),
        (JOB, {"memory.max": "max\n"}, None),
        ("/docker/0123", {"memory.max": "max\n"}, None),
    ],
)
def test_a_group_of_a_login_counts_if_it_has_a_limit_and_any_other_group_always(
    tmp_path: Path, path: str, limits: Files, counts: str | None
) -> None:
    files = {f"mount{path}/{name}": text for name, text in limits.items()}
    assert groups(tmp_path, files | {"proc/self/cgroup": f"0::{path}\n"}) == (f":{path if counts is None else counts}",)


def rights(folder: Path, capabilities: str, label: str) -> tuple[str, ...]:
    status = f"Name:\tpython\nCapAmb:\t{capabilities}\nCapBnd:\t000001ffffffffff\nNoNewPrivs:\t0\n"
    proc, _ = write(folder, {"proc/self/status": status, "proc/self/attr/current": label})
    return confinement.rights(proc)


@pytest.mark.parametrize(
    ("capabilities", "label", "same"),
    [
        ("0000000800000000", "unconfined\n", True),  # of `systemd --user` and of a desktop
        ("0000000000000000", "code (unconfined)\n", True),  # AppArmor's name for a program that may do all
        ("0000000000000000", "", True),
        ("0000000000000400", "unconfined\n", False),
        ("0000000000000000", "snap.jupyter (enforce)\n", False),
    ],
)
def test_what_takes_nothing_away_is_not_another_place(
    tmp_path: Path, capabilities: str, label: str, same: bool
) -> None:
    plain = rights(tmp_path, "0000000000000000", "unconfined\n")

    assert (rights(tmp_path, capabilities, label) == plain) is same


def test_a_limit_of_any_terminal_above_counts(tmp_path: Path) -> None:
    above = TERMINAL.rpartition("/")[0]
    files = {
        f"mount{TERMINAL}/memory.max": "max",
        f"mount{above}/memory.max": "7",
        "proc/self/cgroup": f"0::{TERMINAL}",
    }
    assert groups(tmp_path, files) == (f":{above}",)


def test_groups_of_version_1_count_each_by_its_own_limits(tmp_path: Path) -> None:
    path = f"{USER}/session-3.scope"
    files = {
        "proc/self/cgroup": f"5:name=systemd:{path}\n4:memory:{path}\n3:devices:{path}\n2:cpu,cpuacct:{path}\n0::{path}\n",
        f"mount/memory{path}/memory.limit_in_bytes": "9223372036854771712\n",
        f"mount/devices{path}/devices.list": "c 1:3 rwm\n",
        f"mount/cpu,cpuacct{path}/x": "",
        f"mount/cpu{path}/cpu.cfs_quota_us": "-1\n",
        f"mount/unified{path}/cgroup.procs": "1\n",
    }
    assert groups(tmp_path, files) == (
        f"name=systemd:{USER}", f"memory:{USER}", f"devices:{path}", f"cpu,cpuacct:{USER}", f":{USER}",
    )  # fmt: skip


def test_a_group_that_is_not_visible_may_have_limits(tmp_path: Path) -> None:
    assert groups(tmp_path, {"proc/self/cgroup": f"0::{TERMINAL}\n", "mount/x": ""}) == (f":{TERMINAL}",)


ODD = {
    "empty": "",
    "no colons": "what\nis this\n",
    "bytes": "0::/\udcff\udcfe\n4:memory:/\udcff\n",
    "path above": "0::/../../etc\n",
    "a long path": "0::/" + "x" * 5000 + "\n",
    "escape codes": "0::/\x1b[31mred\n",
    "deleted": "0::/job (deleted)\n",
    "colons": "0::/a:b:c\n",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_contents_of_proc_are_survived(tmp_path: Path, text: str) -> None:
    limits = {"mount/memory.max": "what", "mount/cpu.max": "1 0 7", "mount/cpu.cfs_quota_us": "\udcff"}
    proc, mount = write(tmp_path, {"proc/self/cgroup": text, "proc/self/environ": "\udcff=\0=\0a", **limits})
    shown = str(ConfinementReport.of(None, proc, mount))
    assert "no limit of memory" in shown
    assert "\x1b" not in shown
    assert len(shown) < 400


def test_a_system_without_proc_has_no_place(tmp_path: Path) -> None:
    nowhere = confinement.place(None, tmp_path / "none", tmp_path / "none")
    assert not any(nowhere.namespaces)
    assert not nowhere.differs(confinement.place())
    assert "no limit of memory" in str(ConfinementReport.of(None, tmp_path / "none", tmp_path / "none"))
    with pytest.raises(OSError, match="No such file"):
        ConfinementReport.of(os.getpid(), tmp_path / "none", tmp_path / "none")


ITS_FILES = "proc/self/root"
CONTAINERS = {
    "Docker container 0123456789ab": {"proc/self/cgroup": f"0::/system.slice/docker-{'0123456789abcdef' * 4}.scope"},
    "Docker container": {f"{ITS_FILES}/.dockerenv": ""},
    "Podman container": {f"{ITS_FILES}/run/.containerenv": "", f"{ITS_FILES}/.dockerenv": ""},
    "Podman container 0123456789ab": {"proc/self/cgroup": "4:memory:/machine.slice/libpod-0123456789abcd.scope"},
    "Apptainer container": {f"{ITS_FILES}/.singularity.d/x": ""},
    "Kubernetes container": {"proc/self/cgroup": "0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod7.slice"},
    "containerd container 0123456789ab": {"proc/self/cgroup": "0::/kubepods/pod7/cri-containerd-0123456789abcd.scope"},
    "LXC container web": {"proc/self/cgroup": "0::/lxc.payload.web"},
    "": {"proc/self/cgroup": "0::/user.slice"},
}


@pytest.mark.parametrize("expected", CONTAINERS, ids=lambda name: name or "none")
def test_containers_are_known_by_their_files_and_groups(tmp_path: Path, expected: str) -> None:
    proc, mount = write(tmp_path, CONTAINERS[expected])
    assert ConfinementReport.of(None, proc, mount).container == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("APPTAINER_CONTAINER", "/images/a.sif", "Apptainer container /images/a.sif"),
        ("SINGULARITY_CONTAINER", "/images/a.sif", "Singularity container /images/a.sif"),
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1", "Kubernetes container pod-7"),
        ("container", "systemd-nspawn", "systemd-nspawn container"),
        ("ENROOT_ROOTFS", "/x", "Enroot container"),
    ],
)
def test_containers_are_known_by_their_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOSTNAME", "pod-7")
    assert ConfinementReport.of(None, tmp_path, tmp_path).container == expected


@pytest.mark.parametrize("name", ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"])
def test_any_other_namespace_is_another_place(name: str) -> None:
    here = confinement.place()
    links = list(here.namespaces)
    assert links[confinement.NAMESPACES.index(name)] == confinement._link(Path(f"/proc/self/ns/{name}"))
    links[confinement.NAMESPACES.index(name)] = "x:[1]"
    assert replace(here, namespaces=tuple(links)).differs(here)


def test_another_root_group_or_job_is_another_place() -> None:
    here = confinement.place()
    assert not confinement.place(os.getpid()).differs(here)
    assert replace(here, root=(1, 1)).differs(here)
    assert replace(here, groups=(":/other",)).differs(here)
    assert replace(here, job=("Slurm", "7", "")).differs(here)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}),
        ({"PBS_JOBID": "7.head"}, {}),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "1"}, {"LSB_JOBID": "7", "LSB_JOBINDEX": "2"}),
        ({"SGE_TASK_ID": "undefined", "JOB_ID": "7"}, {"SGE_TASK_ID": "undefined", "JOB_ID": "8"}),
        ({"FLUX_JOB_ID": "f7"}, {"FLUX_JOB_ID": "f8"}),
        ({"OAR_JOB_ID": "7"}, {"OAR_JOB_ID": "8"}),
        ({"_CONDOR_SCRATCH_DIR": "/execute/dir_7"}, {"_CONDOR_SCRATCH_DIR": "/execute/dir_8"}),
        ({"PJM_JOBID": "7", "PJM_BULKID": "1"}, {"PJM_JOBID": "7", "PJM_BULKID": "2"}),
        ({"COBALT_JOBID": "7"}, {"COBALT_JOBID": "8"}),
    ],
)
def test_jobs_of_every_scheduler_are_told_apart(one: Files, other: Files) -> None:
    assert confinement.job(one) != confinement.job(other)
    assert confinement.job(one) == confinement.job({**one, "JOB_ID": one.get("JOB_ID", ""), "HOME": "/"})


def test_a_variable_of_the_users_own_is_not_a_job() -> None:
    assert confinement.job({"JOB_ID": "mine", "SLURM_JOB_ID": ""}) == ()


def test_who_removes_the_variables_of_a_job_stays_in_it() -> None:
    """Notebooks do that before they load the extension, so that a library does not take them for a step of the job."""
    program = dedent("""\
        import os, subprocess, sys
        from jupyter_distrib.system import confinement
        del os.environ['SLURM_JOB_ID']
        print(confinement.place().job, confinement.job_variables())
        child = subprocess.Popen(['sleep', '60'], env={**os.environ, **confinement.job_variables()})
        print(confinement.is_here(child.pid))
        child.kill()
        child.wait()""")
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "SLURM_JOB_ID": "7"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["('Slurm', '7') {'SLURM_JOB_ID': '7'}", "True"]


FINGERPRINT = "from jupyter_distrib.pools import server_home; print(server_home.fingerprint())"


def fingerprint(*below: str) -> str:
    command = [*below, sys.executable, "-c", FINGERPRINT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if done.returncode and below:
        pytest.skip(f"not here: {done.stderr}")
    assert done.stdout, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def here() -> str:
    return fingerprint()


def test_kernels_with_the_same_namespaces_and_rights_share_an_agent(here: str) -> None:
    assert fingerprint() == here


@pytest.mark.parametrize(
    "below",
    [
        ("unshare", "--mount"),
        ("unshare", "--ipc"),
        ("unshare", "--pid", "--fork", "--mount-proc"),
        ("unshare", "--cgroup"),
        ("unshare", "--user", "--map-root-user"),
        ("setpriv", "--no-new-privs"),
        ("setpriv", "--groups", "12345"),
        ("setpriv", "--regid", "12345", "--clear-groups"),
        pytest.param(
            ("setpriv", "--bounding-set", "-sys_admin"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to leave out"),
        ),
    ],
    ids=lambda below: below[1],
)
def test_kernels_with_other_namespaces_or_rights_have_agents_of_their_own(below: tuple[str, ...], here: str) -> None:
    assert fingerprint(*below) != here
