"""Parts of uploads that were killed do not stay: they are in no listing, and paid for, or fill the disk of a folder."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from raytrain.errors import OwnerChanged
from raytrain.runs.ownership import claim_run
from raytrain.runs.records import delete_run
from raytrain.storage import bucket as bucket_store
from raytrain.storage.open import open_store
from tests.helpers.faulty_s3 import faulty_s3

pytestmark = pytest.mark.not_quick
OTHERS = ["runs/run-2/checkpoints/step-000000003.pt", "runs/run/checkpoints/notes.pt"]


@dataclass(frozen=True)
class Bucket:
    client: Any
    name: str

    @property
    def storage(self) -> str:
        return f"s3://{self.name}/runs"

    def uploads(self) -> list[str]:
        answer = self.client.list_multipart_uploads(Bucket=self.name)
        return sorted(upload["Key"] for upload in answer.get("Uploads", []))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket with the run ``run``, whose last owner was killed in an upload."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    bucket = Bucket(client, uuid.uuid4().hex)
    client.create_bucket(Bucket=bucket.name)
    store = open_store(f"{bucket.storage}/run")
    with claim_run(store, "run"):
        store.put("config.json", b'{"batch_size": 1}')
    for key in ("runs/run/checkpoints/step-000000003.pt", *OTHERS):
        upload = client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]
        client.upload_part(Bucket=bucket.name, Key=key, UploadId=upload, PartNumber=1, Body=b"x")
    yield bucket
    server.stop()


def test_the_next_owner_of_a_run_aborts_them_and_leaves_those_of_others(bucket: Bucket) -> None:
    with claim_run(open_store(f"{bucket.storage}/run"), "run"):
        assert bucket.uploads() == OTHERS


def test_who_uploads_when_another_owner_aborts_it_says_who_that_is(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").write_bytes(bytes(12 << 20))
    path = "checkpoints/step-000000006.pt"

    def take_over(request: BaseHTTPRequestHandler, body: bytes) -> bytes | None:
        if "partNumber=" not in request.path:
            return None
        claim = dataclasses.replace(owner.claim, token="other", fence=9, host="elsewhere")
        bucket.client.put_object(Bucket=bucket.name, Key="runs/run/claim.json", Body=claim.to_json())
        return b"<Error><Code>NoSuchUpload</Code><Message>It was aborted.</Message></Error>"

    with faulty_s3(os.environ["AWS_ENDPOINT_URL"], interfere=take_over) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with (
            claim_run(open_store(f"{bucket.storage}/run"), "run") as owner,
            pytest.raises(OwnerChanged, match="elsewhere"),
        ):
            owner.owned_store.put_file(path, tmp_path / "checkpoint")


def test_an_upload_that_has_waited_for_others_is_not_sent_if_the_owner_has_changed_meanwhile(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").write_bytes(b"of the owner before")

    @contextmanager
    def take_over_meanwhile(num_bytes: int) -> Iterator[int]:
        claim = dataclasses.replace(owner.claim, token="other", fence=9, host="elsewhere")
        bucket.client.put_object(Bucket=bucket.name, Key="runs/run/claim.json", Body=claim.to_json())
        yield 4

    store = open_store(f"{bucket.storage}/run")
    with claim_run(store, "run") as owner:
        # Only here can a test be sure that the owner changes while the upload waits.
        monkeypatch.setattr(bucket_store._sending, "room_for", take_over_meanwhile)
        with pytest.raises(OwnerChanged, match="elsewhere"):
            owner.owned_store.put_file("checkpoints/step-000000006.pt", tmp_path / "checkpoint")
    assert "checkpoints/step-000000006.pt" not in [entry.path for entry in store.list()]


def test_rm_aborts_them(bucket: Bucket) -> None:
    command = [sys.executable, "-m", "raytrain", "rm", "run", "--storage", bucket.storage, "--yes"]
    ended = subprocess.run(command, env={**os.environ}, capture_output=True, text=True)
    assert (ended.returncode, bucket.uploads()) == (0, OTHERS), ended.stderr


def test_a_server_that_refuses_to_list_them_stops_nobody(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: BaseHTTPRequestHandler, body: bytes) -> bytes | None:
        denied = b"<Error><Code>AccessDenied</Code><Message>Not you.</Message></Error>"
        return denied if "?uploads" in request.path else None

    with faulty_s3(os.environ["AWS_ENDPOINT_URL"], interfere=refuse) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        delete_run(bucket.storage, "run")
    assert len(bucket.uploads()) == 3 and "Contents" not in bucket.client.list_objects_v2(Bucket=bucket.name)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A file that a process has left in the checkpoints of the run ``run``, as it was killed while it wrote one."""
    store = open_store(f"{tmp_path}/run")
    with claim_run(store, "run"):
        store.put("config.json", b'{"batch_size": 1}')
        store.put("checkpoints/step-000000003.pt", b"x")
    path = tmp_path / "run" / "checkpoints" / f".{uuid.uuid4().hex}.part"
    path.write_bytes(b"x")
    return path


@pytest.mark.parametrize(("idle_s", "stays"), [(3600, False), (0, True), (-3600, True)])
def test_the_next_owner_of_a_run_removes_unfinished_files_to_which_nobody_writes(
    idle_s: float, stays: bool, unfinished: Path
) -> None:
    written_at = unfinished.stat().st_mtime - idle_s  # by the clock of the disk, which may go wrong
    os.utime(unfinished, (written_at, written_at))
    with claim_run(open_store(str(unfinished.parents[1])), "run"):
        assert unfinished.exists() == stays
    assert (unfinished.parent / "step-000000003.pt").exists()


def test_rm_removes_unfinished_files_at_once(unfinished: Path) -> None:
    delete_run(str(unfinished.parents[2]), "run")
    assert not unfinished.parents[1].exists()
