"""The cluster that ``ray start --head`` started on this machine, if there is one."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from raytrain.backends.ray.private_api import CURRENT_CLUSTER_FILE


def ray_start_address() -> str | None:
    """Its address, if this user, or root started it, and it answers.

    Ray writes the address into a folder that everybody may write to. Another user's cluster would run this user's code,
    and would be shown this user's token. Found without importing Ray, which takes a second.
    """
    note = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / CURRENT_CLUSTER_FILE
    with suppress(OSError, ValueError), open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        if os.fstat(file.fileno()).st_uid not in (0, os.getuid()):
            return None
        address = file.read().strip()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=1.0):
            return address
    return None
