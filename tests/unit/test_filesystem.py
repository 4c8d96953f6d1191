"""`raytrain.filesystem`: s3fs with raytrain's credentials, for pandas, pyarrow and fsspec."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from s3fs import S3FileSystem

import raytrain
from raytrain.demo.s3_server import S3Server
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store, read_input, write_output
from tests.helpers.key_issuer import Issuer, issuing_s3
from tests.helpers.scripted_s3 import refusal, scripted_s3


def test_pandas_pyarrow_and_fsspec_read_a_runs_documents(s3_url: str) -> None:
    store = open_store(f"{s3_url}/first")
    store.put("metrics.jsonl", b'{"step": 10, "loss": 0.5}\n{"step": 20, "loss": 0.25}\n')
    sink = io.BytesIO()
    pq.write_table(pa.table({"key": ["a/1.jpg", "b/2.jpg"]}), sink)
    store.put("manifest.parquet", sink.getvalue())
    files = raytrain.filesystem(s3_url)
    assert isinstance(files, S3FileSystem)
    assert sorted(files.ls(f"{s3_url}/first", detail=False)) == [
        f"{s3_url.removeprefix('s3://')}/first/{name}" for name in ("manifest.parquet", "metrics.jsonl")
    ]
    with files.open(f"{s3_url}/first/metrics.jsonl") as file:
        assert pandas.read_json(file, lines=True)["loss"].tolist() == [0.5, 0.25]
    manifest = pyarrow.dataset.dataset(f"{s3_url}/first/manifest.parquet".removeprefix("s3://"), filesystem=files)
    assert manifest.to_table()["key"].to_pylist() == ["a/1.jpg", "b/2.jpg"]


def test_a_file_that_was_written_meanwhile_is_listed(s3_url: str) -> None:
    files, store = raytrain.filesystem(s3_url), open_store(s3_url)
    store.put("a.txt", b"a")
    assert len(files.ls(s3_url)) == 1
    store.put("b.txt", b"b")
    assert len(files.ls(s3_url)) == 2


def test_credentials_that_a_program_issues_are_accepted_and_renewed(
    s3_server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(s3_url).put("a.txt", b"content")
    issuer = Issuer(tmp_path)
    with issuing_s3(s3_server, issuer) as endpoint_url:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        for name, value in issuer.environment(endpoint_url).items():
            monkeypatch.setenv(name, value)
        files = raytrain.filesystem(s3_url)
        assert files.cat_file(f"{s3_url}/a.txt") == b"content"  # these are in their last minutes, and so renewed
        assert files.cat_file(f"{s3_url}/a.txt") == b"content"
    assert len(issuer.issued()) > 1


def test_no_secret_is_in_its_text_its_pickle_or_its_json(s3: S3Server, s3_url: str) -> None:
    files = raytrain.filesystem(s3_url)
    assert files.ls(s3_url.rpartition("/")[0]) is not None  # it has used its credentials
    secret = s3.environment()["AWS_SECRET_ACCESS_KEY"]
    pickled = pickle.dumps(files)
    assert secret not in repr(files) + repr(vars(files)) and secret.encode() not in pickled
    assert pickle.loads(pickled).ls(s3_url.rpartition("/")[0]) is not None and secret not in files.to_json()


def test_its_errors_are_sentences_when_a_command_reads_or_writes(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"There is no bucket nowhere at http"):
        write_output("s3://nowhere/x.csv", b"")
    with pytest.raises(StorageError, match=r"There is no file s3://tests/missing.csv; check the path"):
        read_input("s3://tests/missing.csv")
    with scripted_s3(lambda request: refusal(403, "AccessDenied")) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(StorageError, match=r"has no permission for s3://bucket/labels.csv"):
            read_input("s3://bucket/labels.csv")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"There are no AWS credentials for s3://bucket/labels.csv"):
        read_input("s3://bucket/labels.csv")
    with pytest.raises(UsageError, match="must not contain credentials"):
        raytrain.filesystem("s3://key:secret@bucket/x")


def test_a_write_arrives_whole(s3_url: str) -> None:
    write_output(f"{s3_url}/out/x.csv", b"a,b\n")
    assert open_store(f"{s3_url}/out").get("x.csv") == b"a,b\n" == read_input(f"{s3_url}/out/x.csv")


def test_a_folder_is_the_local_file_system(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("content")
    assert raytrain.filesystem(str(tmp_path)).cat_file(str(tmp_path / "a.txt")) == b"content"
    with pytest.raises(StorageError, match="There is no file"):
        read_input(str(tmp_path / "missing.csv"))
