from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from obstore.store import S3Store

from raytrain.demo.s3_server import S3Server
from raytrain.errors import StorageError
from tests.helpers.waiting import wait_for

DEADLINE_S = 20.0


def bucket(environment: dict[str, str], **changes: str) -> S3Store:
    keys = {
        "endpoint": environment["AWS_ENDPOINT_URL"],
        "region": environment["AWS_REGION"],
        "access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
    }
    return S3Store("bucket", client_options={"allow_http": True}, config={**keys, **changes})  # pyright: ignore[reportArgumentType]


pytestmark = pytest.mark.not_quick


def listens(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port or 0), timeout=1).close()
    except OSError:
        return False
    return True


def test_written_objects_are_in_the_folder_when_the_server_is_closed(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    with S3Server(tmp_path) as server:
        bucket(server.environment()).put("a/b.bin", b"x" * 6_000_000)
    assert (tmp_path / "bucket/a/b.bin").read_bytes() == b"x" * 6_000_000
    assert not listens(server.endpoint_url)


def test_a_wrong_secret_is_refused_and_each_server_has_new_credentials(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    with S3Server(tmp_path) as first, S3Server(tmp_path) as second:
        bucket(first.environment()).put("a", b"1")
        with pytest.raises(Exception, match="SignatureDoesNotMatch"):
            bucket(first.environment(), secret_access_key="wrong").put("a", b"1")
        assert first.environment()["AWS_SECRET_ACCESS_KEY"] != second.environment()["AWS_SECRET_ACCESS_KEY"]


def test_the_secret_is_in_no_command_line(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        secret = server.environment()["AWS_SECRET_ACCESS_KEY"]
        assert len(secret) >= 40 and secret not in repr(vars(server)["_process"].args) + repr(server)
        assert not [p for p in psutil.process_iter(["cmdline"]) if secret in " ".join(p.info["cmdline"] or [])]


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server, pytest.raises(StorageError, match=r"did not start.*address already in use"):
        S3Server(tmp_path, port=urlsplit(server.endpoint_url).port or 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the server with its parent on Linux only")
def test_the_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    start = "from raytrain.demo.s3_server import S3Server; print(S3Server(sys.argv[1]).endpoint_url, flush=True)"
    program = f"import signal, sys; {start}; signal.pause()"
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    url = parent.stdout.readline().strip()
    assert listens(url)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: not listens(url))


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with S3Server(tmp_path):
        (server,) = set(psutil.Process().children()) - before
        assert os.getpgid(server.pid) != os.getpgid(0)  # A terminal sends Ctrl-C to its foreground process group.
    assert not server.is_running()
