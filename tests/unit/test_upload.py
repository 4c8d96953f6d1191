"""Uploads: all files arrive, nothing is sent twice, and missing files are reported."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raytrain.cli.main import main
from raytrain.data.labels.folders import build_manifest
from raytrain.datasets.upload import UploadResult, upload
from raytrain.demo.demo import render_digits
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store
from raytrain.storage.store import Store

LARGE = bytes(range(256)) * 24_000  # A multipart upload, whose ETag is not the MD5 of the content.


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, data in {"cat/1.jpg": b"one", "dog/a/2.jpg": b"two", "top.txt": b"three", "dog/large.png": LARGE}.items():
        (tmp_path / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / path).write_bytes(data)
    return tmp_path / "images"


def contents(store: Store) -> dict[str, bytes]:
    return {stored.path: store.get(stored.path) for stored in store.list()}


def test_all_files_arrive_except_hidden_ones(folder: Path, s3_url: str) -> None:
    (folder / ".hidden").write_text("")
    for name in (".DS_Store", "Icon\r", "Thumbs.db"):
        (folder / "cat" / name).write_text("")
    result = upload(str(folder), s3_url, quiet())
    assert contents(open_store(s3_url)) == {
        "cat/1.jpg": b"one",
        "dog/a/2.jpg": b"two",
        "top.txt": b"three",
        "dog/large.png": LARGE,
    }
    assert result == UploadResult(str(folder), s3_url, num_files=4, num_bytes=11 + len(LARGE), num_sent=4)


def test_names_that_a_bucket_cannot_have_are_refused_before_anything_is_sent(folder: Path, s3_url: str) -> None:
    (folder / "cat" / "a\nb.jpg").write_text("")
    with pytest.raises(UsageError, match=r"1 of 5 files in .* such as 'cat/a\\nb.jpg'; rename them"):
        upload(str(folder), s3_url, quiet())
    assert not list(open_store(s3_url).list())


def test_images_arrive_with_their_classes(s3_url: str, tmp_path: Path) -> None:
    upload(str(render_digits(tmp_path, num_images=40, validation_fraction=0.25)), s3_url, quiet())
    manifest = build_manifest(open_store(f"{s3_url}/train"))
    assert manifest.classes == tuple("0123456789") and len(manifest) == 30


def test_a_second_upload_sends_only_what_is_missing_or_different(folder: Path, s3_url: str) -> None:
    upload(str(folder), s3_url, quiet())
    assert upload(str(folder), s3_url, quiet()).num_sent == 0
    (folder / "cat" / "1.jpg").write_bytes(b"eno")  # The same size as before.
    (folder / "dog" / "large.png").write_bytes(LARGE[::-1])
    open_store(s3_url).delete("top.txt")
    assert upload(str(folder), s3_url, quiet()).num_sent == 3
    assert contents(open_store(s3_url))["cat/1.jpg"] == b"eno"
    assert contents(open_store(s3_url))["dog/large.png"] == LARGE[::-1]


def test_a_file_that_did_not_arrive_is_an_error(folder: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put: Any = type(open_store(s3_url)).put
    monkeypatch.setattr(
        type(open_store(s3_url)),
        "put",
        lambda self, path, data: put(self, path, data[:-1] + b"?" if "1.jpg" in path else data),
    )
    with pytest.raises(
        StorageError,
        match=f"1 of 4 files in {s3_url} differ from those in .*images or are missing, such as cat/1.jpg; run",
    ):
        upload(str(folder), s3_url, quiet())


def test_wrong_folders_and_urls_are_refused(folder: Path, s3_url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'tests/images' is not the URL of a bucket; write s3://bucket/prefix, gs://"):
        upload(str(folder), "tests/images", quiet())
    with pytest.raises(StorageError, match="There is no folder"):
        upload(str(tmp_path / "none"), s3_url, quiet())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="There are no files in"):
        upload(str(tmp_path / "empty"), s3_url, quiet())


def test_the_command_reports_the_result(folder: Path, s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upload", str(folder), s3_url, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_sent"] == 4
    assert "Uploading to" in err
