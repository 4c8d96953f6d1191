"""Several hosts on one machine, which share nothing but a network and their disk's files: for root on Linux.

A host is a process in namespaces of its own: network, processes, mounts and host name. It has an address on a bridge,
an SSH server, a home folder, and its own ``/dev/shm`` and folders of Ray. It ends with its process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.helpers.ray_head import wait_for_port
from tests.helpers.waiting import DEADLINE_S, wait_for

BRIDGE = "raytrain0"
NETWORK = "10.77.0"
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "ssh", "sshd", "rsync")

_SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
PidFile none
Subsystem sftp internal-sftp
"""
_USERS = """root:x:0:0:root:{home}:/bin/bash
sshd:x:100:65534::/run/sshd:/usr/sbin/nologin
"""
_NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
# Ray looks for a head among all processes that it sees, and keeps its files in these folders.
_BOOT = """
set -e
mount --make-rprivate /
mkdir -p /tmp/ray /tmp/ray_tmp_mount /run/sshd
for folder in /tmp/ray /tmp/ray_tmp_mount /dev/shm; do mount -t tmpfs host $folder; done
mount --bind {home}/passwd /etc/passwd
mount --bind {hosts} /etc/hosts
hostname {name}
ip link set lo up
echo started
read _  # until the network is there
exec {sshd} -D -e -f {config}
"""


def missing_programs() -> list[str]:
    """What must be installed before there can be hosts."""
    return [name for name in PROGRAMS if not shutil.which(name)]


class Host:
    """A running host."""

    def __init__(self, name: str, number: int, folder: Path, hosts_file: Path) -> None:
        self.name, self.address = name, f"{NETWORK}.{number}"
        self._wire = f"rt-{name}"
        self.home = home = folder / name
        home.mkdir()
        (home / "passwd").write_text(_USERS.format(home=home))
        boot = _BOOT.format(
            home=home, hosts=hosts_file, name=name, sshd=shutil.which("sshd"), config=folder / "sshd_config"
        )
        self._process = subprocess.Popen(
            [*_NAMESPACES, "sh", "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.log").open("w"),
            text=True,
        )
        self._plug_in()

    def run(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on this host."""
        there = ["nsenter", f"--target={self._inside()}", "--all", f"--wd={os.getcwd()}"]
        pipe = subprocess.PIPE
        full = {**os.environ, **(environment or {})}
        return subprocess.Popen([*there, *words], env=full, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def output(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run a command on this host, and return what it prints."""
        process = self.run(words, environment)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output + errors
        return output

    def cut_off(self) -> None:
        """Take this host off the network, without a word to anybody."""
        ip("link", "set", self._wire, "down")

    def limit(self, megabits_per_s: int) -> None:
        """Let this host send and receive no faster."""
        rate = ["tbf", "rate", f"{megabits_per_s}mbit", "burst", "256kb", "latency", "100ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self._wire, "root", *rate], check=True)
        inside = ["nsenter", f"--target={self._inside()}", "--net"]
        subprocess.run([*inside, "tc", "qdisc", "replace", "dev", "eth0", "root", *rate], check=True)

    def close(self) -> None:
        ip("link", "del", self._wire)  # the kernel would take its time
        self._process.kill()
        self._process.wait()

    def _plug_in(self) -> None:
        assert self._process.stdout is not None and self._process.stdin is not None
        assert self._process.stdout.readline() == "started\n"
        inside = self._inside()
        ip("link", "add", self._wire, "type", "veth", "peer", "name", "eth0", "netns", str(inside))
        ip("link", "set", self._wire, "master", BRIDGE, "up")
        for words in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(["nsenter", f"--target={inside}", "--net", "ip", *words], check=True)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wait_for_port(22, self.address)

    def _inside(self) -> int:
        """The ID of the host's first process, as this machine sees it."""
        unshare = psutil.Process(self._process.pid)
        wait_for(lambda: bool(unshare.children()), otherwise=f"{self.name} did not start")
        return unshare.children()[0].pid


@contextmanager
def hosts(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Start hosts that know each other by ``names``; this machine is ``10.77.0.254``, and ``folder``/key opens them."""
    ip("link", "add", BRIDGE, "type", "bridge")
    started: dict[str, Host] = {}
    try:
        ip("addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        _make_keys(folder)
        hosts_file = folder / "hosts"
        lines = [f"{NETWORK}.{number} {name}" for number, name in enumerate(names, 1)]
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for number, name in enumerate(names, 1):
            started[name] = Host(name, number, folder, hosts_file)
        yield started
    finally:
        for host in started.values():
            host.close()
        ip("link", "del", BRIDGE)


def _make_keys(folder: Path) -> None:
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder))


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
