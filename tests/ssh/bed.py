"""Hosts for tests of ssh: a real sshd on 127.0.0.2, 127.0.0.3 ..., each in namespaces of its own, with throw-away keys.

A host has its own name, /tmp, /run and /dev/shm, and shares the processes, the network and all other folders with this
machine; what runs there is known by its UTS namespace. Needs root, for the namespaces; sshd may lie in a folder of its
own (`JUPYTER_DISTRIB_SSHD`, which `.ci/ssh` sets)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.processes import wait_until

PORT = 2022
_INSIDE = """
set -e
hostname "$1"
mount --make-rprivate /
for folder in /tmp /run /dev/shm; do
    mount -t tmpfs -o size="$4" "$1" $folder
done
mkdir -p /run/sshd
grep -v '^sshd:' /etc/passwd >/run/passwd
echo 'sshd:x:65530:65534::/run/sshd:/usr/sbin/nologin' >>/run/passwd
mount --bind /run/passwd /etc/passwd
exec "$2" -D -e -f "$3"
"""
"""Run as `sh -c` with the host's name, the sshd, its configuration, and the size of its folders."""


def sshd() -> str:
    """The path of sshd, or nothing."""
    return os.environ.get("JUPYTER_DISTRIB_SSHD") or shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin") or ""


def missing() -> str:
    """Why there are no such hosts here, or nothing."""
    if not sshd():
        return "there is no sshd here (sh .ci/ssh brings one)"
    if os.getuid() != 0:
        return "hosts in namespaces need root"
    tried = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One sshd, and what runs below it."""

    def __init__(self, folder: Path, number: int, *, size: str = "1g", extra: Sequence[str] = ()) -> None:
        self.name, self.address = f"host{number}", f"127.0.0.{number + 1}"
        self._keys(folder)
        config = folder / f"{self.name}.conf"
        lines = [
            f"ListenAddress {self.address}:{PORT}",
            f"HostKey {folder / self.name}",
            f"AuthorizedKeysFile {folder}/user.pub",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication yes",
            "PidFile none",
            "PermitRootLogin yes",
            "MaxStartups 100",
            "Subsystem sftp internal-sftp",  # for scp
            *extra,
        ]
        config.write_text("\n".join(lines) + "\n")
        self.log = (folder / f"{self.name}.log").open("wb")
        command = ["unshare", "--mount", "--uts", "sh", "-c", _INSIDE, "sh", self.name, sshd(), str(config), size]
        self.process = subprocess.Popen(command, stderr=self.log, stdout=self.log, stdin=subprocess.DEVNULL)
        assert wait_until(self._listens, 20), Path(self.log.name).read_text()
        self.namespace = os.readlink(f"/proc/{self.process.pid}/ns/uts")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.address, PORT)) == 0

    def _keys(self, folder: Path) -> None:
        for path in (folder / self.name, folder / "user"):
            if not path.exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)

    def processes(self) -> dict[int, str]:
        """The processes that run on the host below its sshd, with their command lines."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int(entry.name) != self.process.pid and os.readlink(entry / "ns/uts") == self.namespace:
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        return found

    def sessions(self) -> list[int]:
        """The sshd processes that serve connections."""
        return [pid for pid, line in self.processes().items() if line.startswith("sshd: ")]

    def folders(self) -> list[str]:
        """What lies in its /tmp."""
        return [path.name for path in Path("/proc", str(self.process.pid), "root", "tmp").iterdir()]

    def kill(self) -> None:
        """End it as a machine ends that loses its power, but for its network, which says so."""
        for pid in (self.process.pid, *self.processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.log.close()


class Bed:
    """Some hosts, and the configuration of ssh that knows them."""

    def __init__(self, count: int = 2) -> None:
        self.folder = folder = Path(tempfile.mkdtemp(prefix="jd-ssh-", dir="/var/tmp"))  # seen from the hosts as well
        self.hosts = [Host(folder, number) for number in range(1, count + 1)]
        self.config = folder / "ssh_config"
        self.known = folder / "known_hosts"
        self.write_config()

    def write_config(self) -> None:
        self.known.write_text(
            "".join(
                f"[{host.address}]:{PORT} {' '.join((self.folder / f'{host.name}.pub').read_text().split()[:2])}\n"
                for host in self.hosts
            )
        )
        entries = [f"Host {host.name}\n  HostName {host.address}\n" for host in self.hosts]
        common = f"""
            Host *
              Port {PORT}
              IdentityFile {self.folder}/user
              IdentitiesOnly yes
              UserKnownHostsFile {self.known}
              GlobalKnownHostsFile /dev/null
              StrictHostKeyChecking yes
        """
        self.config.write_text("".join(entries) + textwrap.dedent(common))

    @property
    def names(self) -> str:
        return ",".join(host.name for host in self.hosts)

    @property
    def options(self) -> dict[str, str]:
        return {"hosts": self.names, "ssh": f"ssh -F {self.config}", "python": sys.executable}

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        shutil.rmtree(self.folder)
