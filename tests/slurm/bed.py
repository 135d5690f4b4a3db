"""A Slurm of two nodes on loopback: munged, slurmctld and two slurmd, each node with a host name of its own.

Needs root, for the namespaces, and Slurm's programs below one folder (`JUPYTER_DISTRIB_SLURM`, which `.ci/slurm`
makes)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import wait_until

_CONFIG = """\
ClusterName=bed
SlurmctldHost={here}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort=6827
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
PluginDir={libraries}/slurm-wlm
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdParameters=config_overrides
GresTypes=gpu
TaskProlog={folder}/prolog
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.2 Port=6831 CPUs=4 Gres=gpu:4
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.3 Port=6832 CPUs=4 Gres=gpu:4 Feature=fast
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=side Nodes=n2 MaxTime=60 State=UP
PartitionName=urgent Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=9
"""
GPUS = 4
"""The GPUs of each node. Slurm wants no more of them than a device file."""
_PROLOG = """\
#!/bin/sh
echo "export CUDA_GPU_BED=$(cat {folder}/gpus-$SLURMD_NODENAME 2>/dev/null)"
"""
_NODE = """
hostname "$1"
mount --make-rprivate /
mount --bind "$2/hosts" /etc/hosts
exec "$3/usr/sbin/slurmd" -D -d "$3/usr/sbin/slurmstepd" -f "$2/slurm.conf" -N "$1"
"""


def root() -> str:
    """The folder of Slurm's programs, or nothing."""
    return os.environ.get("JUPYTER_DISTRIB_SLURM", "")


def missing() -> str:
    """Why there is no Slurm here, or nothing."""
    if not root():
        return "there is no Slurm here (sh .ci/slurm brings one)"
    return "" if os.getuid() == 0 else "a Slurm of two nodes on one machine needs root"


class SlurmBed:
    """The daemons, and the variables with which its commands are run."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jd-slurm-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        libraries = next(Path(root()).glob("usr/lib/*/slurm-wlm")).parent
        here = socket.gethostname()
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        self._config(here, str(libraries))
        self.environment = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{root()}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = (self.folder / "daemons.log").open("wb")
        self._start()

    def _config(self, here: str, libraries: str) -> None:
        text = _CONFIG.format(here=here, folder=self.folder, libraries=libraries)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {here}\n127.0.0.2 n1\n127.0.0.3 n2\n")
        (self.folder / "prolog").write_text(_PROLOG.format(folder=self.folder))
        (self.folder / "prolog").chmod(0o755)
        for index in range(GPUS):
            os.mknod(self.folder / f"gpu{index}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        gpus = f"{self.folder}/gpu[0-{GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={gpus}\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _start(self) -> None:
        folder = self.folder
        munge = [f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
        munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
        self._run(f"{root()}/usr/sbin/munged", "--force", "--foreground", *munge)
        assert wait_until((folder / "munge.socket").exists, 10)
        self._controller = self._run(f"{root()}/usr/sbin/slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for name in ("n1", "n2"):
            self._run("unshare", "--mount", "--uts", "sh", "-c", _NODE, "sh", name, str(folder), root())
        assert wait_until(lambda: self.output("sinfo", "-h", "-o", "%T").split() == ["idle"], 30), self.output("sinfo")

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, **self.environment}
        process = subprocess.Popen(words, env=env, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL)
        self._processes.append(process)
        return process

    def output(self, *words: str) -> str:
        env = {**os.environ, **self.environment}
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=30).stdout

    def jobs(self) -> list[str]:
        """The jobs that run or wait. One that is COMPLETING has been given back: Slurm cleans its nodes up, and repeats
        a message to a node that got lost only after a minute."""
        return self.output("squeue", "-h", "-t", "PENDING,RUNNING,SUSPENDED", "-o", "%i").split()

    def all_jobs(self) -> set[str]:
        """The jobs that Slurm knows, also those that have ended lately."""
        return set(self.output("squeue", "-h", "-t", "all", "-o", "%A").split())

    def left(self, within_s: float = 30) -> str:
        """What Slurm and the nodes say of jobs that still run or wait after so many seconds; empty if there are none."""
        if wait_until(lambda: not self.jobs(), within_s):
            return ""
        processes = subprocess.run(
            ["ps", "-eo", "pid,ppid,etimes,stat,args"], capture_output=True, text=True, check=False
        )
        log = (self.folder / "ctld.log").read_text(errors="replace")[-4000:]
        return f"{self.output('squeue', '-l')}\n{processes.stdout}\n{log}"

    def feign_gpus(self, node: str, folder: Path) -> None:
        """Have the steps on a node see the GPUs of this `GpuBed`, if their PYTHONPATH begins with its modules."""
        (self.folder / f"gpus-{node}").write_text(str(folder))

    @contextmanager
    def job(self, *asked: str) -> Iterator[dict[str, str]]:
        """Hold a job, and yield the variables of Slurm in it."""
        held = ["salloc", *asked, "sh", "-c", 'env -0; printf "\\0\\n"; cat >/dev/null']
        env = {**os.environ, **self.environment}
        with subprocess.Popen(held, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log) as salloc:
            assert salloc.stdin is not None
            assert salloc.stdout is not None
            try:
                text = b""
                while not text.endswith(b"\0\0\n"):
                    line = salloc.stdout.readline()
                    assert line, f"salloc {asked} has ended"
                    text += line
                pairs = [each.partition("=") for each in text.decode().split("\0")]
                yield {name: value for name, _, value in pairs if name.startswith("SLURM")}
            finally:
                salloc.stdin.close()
                salloc.wait(30)

    @contextmanager
    def controller_away(self) -> Iterator[None]:
        """Freeze the controller for a while."""
        self._controller.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._controller.send_signal(signal.SIGCONT)

    def close(self) -> None:
        for job in self.jobs():
            self.output("scancel", job)
        wait_until(lambda: not self.output("squeue", "-h"), 30)  # steps that end need the daemons
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(20)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
