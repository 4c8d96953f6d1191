"""Finds the Ray on this machine, and checks that a cluster answers at an address and accepts this machine's token.

Ray itself would believe a note that other users have left in a shared folder, try for minutes where nothing listens,
and send no token to a plain ``HOST:PORT``.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from raytrain.config.option_values import MAX_PORT
from raytrain.errors import UsageError
from raytrain.launch.ray.private_api import ANSWER_AT_ONCE, CURRENT_CLUSTER_FILE, set_variables

T = TypeVar("T")


def ray_start_address(users: Collection[int] = ()) -> str | None:
    """Return the address of the Ray on this machine that one of ``users`` started with ``ray start``, if it answers.

    Users are given by their IDs; by default, it is this user only. Ray writes the address into a file in a folder that
    everybody may write to, and leaves it there when the head has ended: by then, another user's process may listen at
    the port. Another user's cluster would run this user's code and see this user's token, so both the file and the
    process that listens must belong to one of ``users``. Ray is not imported for that, which would take a second.
    """
    users = users or {os.getuid()}
    # Find the file as Ray does.
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    folder = next(filter(None, map(os.environ.get, names)), "/tmp")
    address_file = Path(folder) / "ray" / CURRENT_CLUSTER_FILE
    with suppress(OSError, ValueError), open(os.open(address_file, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        if os.fstat(file.fileno()).st_uid not in users:
            return None
        address = file.read().strip()
        host, port = address.rsplit(":", 1)
        listeners = _users_that_listen(int(port))
        if listeners is not None and not (listeners and listeners <= set(users)):  # nobody, or somebody else as well
            return None
        with socket.create_connection((host, int(port)), timeout=1.0):
            return address
    return None


def _users_that_listen(port: int) -> set[int] | None:
    """Return the IDs of the users whose processes listen at ``port`` of this machine; None on macOS, without /proc."""
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    # The columns are sl, local_address (in hexadecimal, with the port), rem_address, st (0A listens), …, uid.
    users = {int(row[7]) for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    return users if tables else None


def check_cluster_answers(address: str) -> None:
    """Raise UsageError if no cluster answers at ``HOST:PORT``, or if it refuses this machine's token.

    Ray itself would try for minutes. If the cluster asks for a token, this process sends this machine's from now on.
    ``auto`` is always refused, because :class:`Connection` has replaced it by an address if a cluster runs here. Other
    forms of address are left to Ray.
    """
    if address == "auto":
        raise no_cluster_error(address, "this user has started none on this machine with `ray start`")
    host, separator, port = address.rpartition(":")
    if not separator or "/" in address:
        return

    # Check that something listens there. The system would take a port that is too large modulo 65,536.
    if not (port.isdecimal() and 1 <= int(port) <= MAX_PORT):
        raise no_cluster_error(address, f"{port} is not a port, which is a number from 1 to {MAX_PORT}")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise no_cluster_error(address, error.strerror or "no answer within 5 seconds") from None

    # Check that it is a cluster, and accepts this machine's token.
    from ray.exceptions import AuthenticationError, RayError

    logging.getLogger("ray").setLevel(logging.ERROR)  # otherwise Ray warns that a token is needed
    try:
        if api := ANSWER_AT_ONCE.find():
            (client_of_head,) = api  # which asks the head when it is made
            with _hidden_lines_of_ray():
                with_token(lambda: client_of_head(address=address))
    except AuthenticationError:
        raise UsageError(
            f"The Ray cluster at {address} asks for a token, and this machine's token is another one; copy "
            "~/.ray/auth_token from its head, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
        ) from None
    except RayError:
        raise no_cluster_error(address, "what listens there does not answer as one of this version") from None


_LINE_OF_RAY = re.compile(rb"\[[-\d]+ [:,\d]+ [A-Z] \d+ \d+\] |.*InvalidAuthToken")


@contextmanager
def _hidden_lines_of_ray() -> Generator[None]:
    """Hide the lines that Ray's C++ code prints on standard error if no head answers, or one refuses the call.

    After a refusal, the next call sends a token; if that fails, too, an exception says so. All other lines, also those
    of other threads, are written at the end of the ``with`` block.
    """
    try:
        standard_error = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            held.seek(0)
            for line in held:
                if not _LINE_OF_RAY.match(line):
                    os.write(2, line)


def with_token(ask: Callable[[], T]) -> T:
    """Return the result of ``ask``. If it needs a token, this process sends this machine's from now on.

    Ray itself does so for a cluster that it finds, but not for a plain ``HOST:PORT``. Raises AuthenticationError if
    there is no token, or if it is the wrong one.
    """
    from ray.exceptions import AuthenticationError

    try:
        return ask()
    except AuthenticationError:
        if "RAY_AUTH_MODE" in os.environ:  # a token was sent already
            raise
    # If the token is right, the setting stays for later calls of this process.
    set_variables({"RAY_AUTH_MODE": "token"})
    try:
        return ask()
    except AuthenticationError:
        del os.environ["RAY_AUTH_MODE"]
        set_variables({})  # has Ray read the variables again, without this one
        raise


def url_error(address: str) -> UsageError:
    """Return the error for a URL: this process can only join a cluster at HOST:PORT."""
    if address.startswith("ray://"):
        return UsageError(
            f"The address is {address}, of a Ray client, in which nothing can be trained; use "
            "`raytrain submit --address http://HOST:8265 -- …`, or --address HOST:6379 on a machine of the cluster."
        )
    return UsageError(
        f"The address is {address}, which takes jobs: use `raytrain submit --address {address} -- …`, or choose a "
        "cluster with --address HOST:6379, auto or local."
    )


def no_cluster_error(address: str, reason: str) -> UsageError:
    """Return the error for an ``address`` at which no cluster answers; of ``reason``, the first line is shown."""
    reason = reason.partition("\n")[0].rstrip(".")
    return UsageError(
        f"No Ray cluster answers at {address} ({reason}); check --address or RAY_ADDRESS, or use --address local for a "
        "new cluster on this machine."
    )
