"""Credentials that a user writes where they do not belong are refused, and never shown."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from raytrain.cli.main import main
from raytrain.demo.s3_server import S3Server
from raytrain.errors import UsageError
from raytrain.storage.filesystem import filesystem
from raytrain.storage.open import open_store

KEY, SECRET = "AKIAKEY", "hunter2"

URLS = [
    f"s3://{KEY}:{SECRET}/x+y@bucket/data",
    f"s3://{KEY}:a/{SECRET}/b@bucket",
    f"s3://{KEY}:/{SECRET}@bucket/me@home",
    f"s3://{KEY}%3A{SECRET}%40bucket/data",
    f"s3://{KEY}:{SECRET}",
    f"s3://bucket/data?AWS_SECRET_ACCESS_KEY={SECRET}",
    f"s3://bucket/data?X-Amz-Credential={KEY}&X-Amz-Signature={SECRET}",
    f"s3://bucket?{SECRET}",
    f"s3://bucket//data?secret={SECRET}",
    f"s3://?secret={SECRET}",
    f"s3://{KEY}:{SECRET}@",
    f"s3://[{KEY}:{SECRET}@bucket/data",
    f"S3://{KEY}:{SECRET}/x@bucket/data",
    f"https://{KEY}:{SECRET}/x@host/bucket",
    f"https://bucket.s3.amazonaws.com/data?X-Amz-Credential={KEY}&X-Amz-Signature={SECRET}",
    f"gs://{KEY}:{SECRET}/x@bucket",
]


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UsageError, match="s3://bucket/prefix") as raised:
        open_store(url)
    shown = f"{raised.value}{raised.value.__cause__}"
    assert SECRET not in shown and KEY not in shown and "\n" not in shown


@pytest.mark.parametrize(
    "url", ["s3://bucket/me@example.com/data", "s3://bucket/a:b/c@d", "s3://my-bucket.eu_1/data#1", "s3://bucket/"]
)
def test_a_usual_url_is_accepted(url: str) -> None:
    assert open_store(url).url == url.rstrip("/")


@pytest.mark.parametrize("url", [URLS[0], "s3://bucket/data", "az://container/data"])
def test_a_url_that_pathlib_has_shortened_is_no_folder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"what pathlib or os.path makes of a URL; give the URL as text") as raised:
        open_store(str(Path(url)))
    with pytest.raises(UsageError, match=r"what pathlib or os.path makes of a URL"):
        filesystem(Path(url))
    assert SECRET not in str(raised.value) and not list(tmp_path.iterdir())


def test_the_command_line_does_not_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for url in URLS:
        assert main(["upload", str(tmp_path), url]) == 2
        assert main(["train", "--data", url, "--storage", str(tmp_path / "runs")]) == 2
    shown = "".join(capsys.readouterr())
    assert SECRET not in shown and KEY not in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "endpoint_url",
    [f"http://user:{SECRET}@host", f"https://{SECRET}@host:9000/", f"http://host?key={SECRET}", f"user:{SECRET}@host"],
)
def test_a_password_in_the_endpoint_is_refused_without_showing_it(
    name: str, endpoint_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, endpoint_url)
    with pytest.raises(UsageError, match=r"AWS_ENDPOINT_URL.* without a user name, a password or a query") as raised:
        open_store("s3://bucket")
    assert SECRET not in str(raised.value)


def test_the_local_s3_server_gets_no_keys_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "RCLONE_CONFIG_PASS", "RCLONE_RC_PASS"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("RCLONE_READ_ONLY", "true")  # an option of the server, as it reads it
    before = psutil.Process().children()
    with S3Server(tmp_path) as server:
        [process] = [child for child in psutil.Process().children() if child not in before]
        names = process.environ().keys()
        monkeypatch.undo()
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        (tmp_path / "bucket").mkdir()
        open_store("s3://bucket").put("a", b"1")
    assert {name for name in names if name.startswith(("AWS_", "RCLONE_"))} == {"RCLONE_AUTH_KEY"}
    assert "PATH" in names and "PATH" in os.environ
    assert (tmp_path / "bucket" / "a").read_bytes() == b"1"
