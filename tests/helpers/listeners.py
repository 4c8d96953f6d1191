"""What a command listens at, seen in a network of its own, where nothing else does: for root on Linux.

Run as a program in that network, this starts a command, notes all ports that any process has open while it runs, and
prints them as JSON. The network has an address besides 127.0.0.1, as any machine has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ADDRESS = "10.66.0.1"  # of the machine in its network
PROGRAMS = ("ip", "ss", "unshare")
_PLACES = {
    **dict.fromkeys(("0.0.0.0", "::", "*"), "all interfaces"),
    "::1": "127.0.0.1",
    ADDRESS: "the node's address",
}
_EVERY_S = 0.02
_PREPARE = f"""
ip link set lo up
ip link add outside type veth peer name beyond
ip address add {ADDRESS}/24 dev outside
ip link set outside up && ip link set beyond up
ip route add default dev outside
exec "$@"
"""


def can_make_networks() -> bool:
    """Return whether this user may, and has the programs for it."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


def listeners_of(command: Sequence[str], folder: Path, until: str = "") -> dict[str, int]:
    """Run ``command`` in ``folder`` to its end, or until it has printed a line with ``until``.

    Return the largest number of ports that were open at a time at each of ``127.0.0.1``, ``the node's address`` and
    ``all interfaces``.
    """
    words = ["unshare", "--net", "bash", "-ec", _PREPARE, "network", sys.executable, "-m", __name__, until, *command]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def _watch(until: str, command: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its jobs in the background ignore it
    most: Counter[str] = Counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    done = threading.Event()

    def print_and_look() -> None:
        nonlocal most
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if until and until in line:
                most |= _open_ports()
                process.send_signal(signal.SIGINT)
        done.set()

    threading.Thread(target=print_and_look).start()
    while not done.wait(_EVERY_S):
        most |= _open_ports()
    code = process.wait()
    print(json.dumps(most))
    sys.exit(0 if until else code)


def _open_ports() -> Counter[str]:
    """Return the number of ports where somebody listens now, or hears the datagrams of anybody, by their interface.

    ss takes 3 ms of CPU for it. psutil takes 30, as it looks at all files of all processes; reading /proc/net takes 10,
    as the kernel goes through its table of all connections.
    """
    ports: set[tuple[str, str]] = set()
    for line in subprocess.run(["ss", "-Hlntu"], capture_output=True, text=True, check=True).stdout.splitlines():
        ip, _, port = line.split()[4].rpartition(":")
        ip = ip.strip("[]").removeprefix("::ffff:")
        ports.add((_PLACES.get(ip, ip), port))
    return Counter(place for place, _ in ports)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2:])
