"""The demo's S3 server listens on this machine only, and refuses requests without credentials."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from raytrain.demo.s3_server import S3Server


def test_the_embedded_server_listens_on_loopback_only(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with S3Server(tmp_path):
        servers = set(psutil.Process().children(recursive=True)) - before
        addresses = {
            each.laddr.ip
            for server in servers
            for each in server.net_connections()
            if each.status == psutil.CONN_LISTEN
        }
    assert addresses == {"127.0.0.1"}


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_requests_without_credentials_are_refused_and_change_nothing(method: str, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(b"1")
    with S3Server(tmp_path) as server:
        asked = urllib.request.Request(
            f"{server.endpoint_url}/bucket/a", method=method, data=b"2" if method == "PUT" else None
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=20)
        assert 400 <= refused.value.code <= 403
    assert (tmp_path / "bucket" / "a").read_bytes() == b"1"
