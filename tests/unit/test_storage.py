from __future__ import annotations

import errno
import logging
import os
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest
from botocore import exceptions
from obstore.exceptions import GenericError, UnauthenticatedError

import raytrain
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.labels.manifest import Manifest
from raytrain.datasets.download import download
from raytrain.demo.s3_server import S3Server
from raytrain.errors import StorageError, UsageError
from raytrain.storage import retries_and_hedges
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import Credentials
from raytrain.storage.open import check_output, new_output, open_store, read_input, write_output
from raytrain.storage.request_errors import explain
from raytrain.storage.store import ObjectChanged, Store
from raytrain.training.weights_source import check_weights_source
from tests.helpers.key_issuer import Issuer, issuing_s3
from tests.helpers.scripted_bucket import KEYS, listing, scripted, source
from tests.helpers.scripted_s3 import Answer, Request, refusal, scripted_s3

OLD_SESSION, NEW_SESSION = (Credentials(f"ASIA{name}", "secret", "token") for name in ("OLD1", "NEW1"))


STARTED = [pytest.param(name, marks=pytest.mark.not_quick) for name in ("s3", "azure")]


@pytest.fixture(params=["folder", "google", *STARTED])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind: all must behave in the same way."""
    url = str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue(f"{request.param}_url")
    return open_store(url)


def error_in_200(code: str) -> GenericError:
    """Make the exception of obstore for a deletion that S3 answers with status 200 and an error."""
    return GenericError(f"Generic S3 error: DeleteObjects request failed for key a: Words (code: {code})\n\nDebug")


def botocore_error(code: str) -> exceptions.ClientError:
    return exceptions.ClientError({"Error": {"Code": code, "Message": "Words."}}, "ListObjectsV2")


def sentence(raised: pytest.ExceptionInfo[StorageError]) -> str:
    """Return the error message, and check that it is one line without secrets and debug output."""
    text = str(raised.value)
    assert text.endswith(".") and "\n" not in text and "source:" not in text and "secret-one" not in text
    return text


# All kinds of store.


def test_a_part_of_an_object_is_read_as_far_as_there_is_one(store: Store) -> None:
    store.put("a", b"0123456789")
    parts = [store.get_range("a", start, num_bytes) for start, num_bytes in ((0, 4), (8, 4), (10, 4), (99, 4))]
    assert parts == [b"0123", b"89", b"", b""]
    store.put("empty", b"")
    assert store.get_range("empty", 0, 4) == b""
    with pytest.raises(FileNotFoundError):
        store.get_range("b", 0, 4)


def test_an_object_can_be_written_read_listed_and_deleted(store: Store) -> None:
    store.put("a/b.bin", b"one")
    store.put("a/b.bin", b"three")
    (listed,) = store.list()
    assert store.get("a/b.bin") == b"three"
    assert (listed.path, listed.size_bytes) == ("a/b.bin", 5)
    assert abs(listed.modified - datetime.now(timezone.utc)) < timedelta(minutes=5)
    assert store.exists("a/b.bin") and not store.exists("a") and not store.exists("b.bin")
    store.delete("a/b.bin")
    store.delete("a/b.bin")
    assert not store.exists("a/b.bin") and not list(store.list())


def test_a_missing_object_raises_file_not_found(store: Store) -> None:
    store.put("a/b", b"1")
    for path in ("c", "a", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=path):
            store.get(path)
    assert list(store.list("nowhere")) == []


@pytest.mark.not_quick
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_every_object_is_listed_once_at_any_depth(store: Store, depth: int) -> None:
    paths = {
        "/".join([f"{a}", *["x"] * level, f"{b}.jpg"]) for a in range(3) for b in range(4) for level in range(depth + 1)
    }
    for path in paths | {"top.txt"}:
        store.put(path, b"1")
    assert sorted(found.path for found in store.list()) == sorted(paths | {"top.txt"})
    for prefix in ("1", "1/"):
        assert sorted(found.path for found in store.list(prefix)) == sorted(
            path for path in paths if path.startswith("1/")
        )


def test_the_etag_changes_with_the_content(store: Store) -> None:
    etags: set[str] = set()
    for content in (b"one", b"two", b"three"):
        store.put("a", content)
        etags |= {found.etag for found in store.list()}
    assert len(etags) == 3


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "name", ["a b", "ü/ä", "a%20b", "x#1", "q?x", "a+b=c&d", "it's", "[1]*", "back\\slash", ".hidden", "日本"]
)
def test_special_characters_in_names_are_preserved(store: Store, name: str) -> None:
    store.put(f"{name}/{name}.jpg", b"1")
    if store.url.startswith("az://"):
        name = name.replace("\\", "/")  # Azure takes one for the other
    assert [found.path for found in store.list()] == [f"{name}/{name}.jpg"]
    assert store.get_many([f"{name}/{name}.jpg"]) == [b"1"]


@pytest.mark.not_quick
def test_get_many_keeps_the_order_and_returns_errors_in_place(store: Store) -> None:
    for i in range(0, 200, 2):
        store.put(f"{i}", str(i).encode())
    got = store.get_many([f"{i}" for i in range(200)])
    assert got[::2] == [str(i).encode() for i in range(0, 200, 2)]
    assert all(isinstance(missing, FileNotFoundError) for missing in got[1::2])
    assert isinstance(pickle.loads(pickle.dumps(got))[1], FileNotFoundError)
    assert store.get_many([]) == []


@pytest.mark.not_quick
def test_a_reader_never_sees_a_partial_object(store: Store) -> None:
    contents = [bytes([i]) * 6_000_000 for i in range(2)]  # A multipart upload.
    store.put("a", contents[0])
    written = threading.Event()

    def write() -> None:
        for i in range(6):
            store.put("a", contents[i % 2])
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = {store.get("a")}
    while not written.is_set():
        seen.add(store.get("a"))
    writer.join()
    assert seen <= set(contents)


def test_a_pickled_store_works_and_contains_no_secret(store: Store, s3_server: S3Server) -> None:
    store.put("a", b"1")
    pickled = pickle.dumps(store)
    assert pickle.loads(pickled).get("a") == b"1"
    assert pickle.loads(pickled).url == store.url
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert s3_server.environment()[name].encode() not in pickled + repr(store).encode()


def test_readable_and_writable_stores_pass_their_checks(store: Store) -> None:
    store.check_writable()
    store.check_readable()
    assert list(store.list()) == []


# Folders.


def test_a_relative_folder_is_resolved_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("runs")
    monkeypatch.chdir("/")
    store.put("a", b"1")
    assert (tmp_path / "runs/a").read_bytes() == b"1" and store.url == str(tmp_path / "runs")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("~no-such-user/a.csv", r"no home folder for ~no-such-user/a\.csv; .* or \./~no-such-user/a\.csv"),
        ('"a.csv"', r"""path "a\.csv" has quotes around it .*; give it as a\.csv\.|--output is '"a\.csv"'"""),
        ("$HOME/a.csv", r"The path \$HOME/a\.csv begins with \$HOME, which only a shell"),
        ("${HOME}/a.csv", r"The path \$\{HOME\}/a\.csv begins with \$HOME, which only a shell"),
    ],
)
def test_what_only_a_shell_would_replace_is_refused(path: str, sentence: str) -> None:
    uses: list[Callable[[str], object]] = [
        open_store,
        read_input,
        lambda path: check_output(path, (".csv",)),
        lambda path: download("cifar10", path),
        check_weights_source,
    ]
    for use in uses:
        with pytest.raises(UsageError, match=sentence):
            use(path)


def test_a_failed_write_keeps_the_old_content_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    store.put("a", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=f"disk of {tmp_path}/a is full; free space") as raised:
        store.put("a", b"new")
    assert sentence(raised)
    assert store.get("a") == b"old" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["a" * 255, "日" * 85])
def test_a_name_may_be_as_long_as_the_disk_allows(name: str, tmp_path: Path) -> None:
    write_output(f"{tmp_path}/{name}", b"1")
    assert read_input(f"{tmp_path}/{name}") == b"1" and os.listdir(tmp_path) == [name]


def test_a_partial_file_of_a_killed_writer_is_not_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / f"a.{'0f' * 16}.part").write_bytes(b"half")
    (tmp_path / "music.part").write_bytes(b"whole")
    assert [found.path for found in store.list()] == ["music.part"]


def test_symlinks_are_followed_except_in_cycles(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/more").mkdir(parents=True)
    (tmp_path / "elsewhere/more/1.jpg").write_bytes(b"1")
    (tmp_path / "data/cat").mkdir(parents=True)
    (tmp_path / "data/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/hen").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/cat/back").symlink_to(tmp_path / "data")
    assert sorted(found.path for found in open_store(str(tmp_path / "data")).list()) == [
        "dog/more/1.jpg",
        "hen/more/1.jpg",
    ]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"There is no folder {tmp_path}/none") as raised:
        open_store(str(tmp_path / "none")).check_readable()
    assert sentence(raised)
    assert list(open_store(str(tmp_path / "none")).list()) == []


def test_a_file_instead_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder, what in (
        ("file", "file is a file, but should be a folder; check the path."),
        ("file/runs", "file/runs is below a file, not below a folder; check the path."),
    ):
        with pytest.raises(StorageError) as raised:
            open_store(str(tmp_path / folder)).check_readable()
        assert str(raised.value) == f"{tmp_path}/{what}"
    with pytest.raises(StorageError, match=r"file/runs is below a file, not below a folder"):
        open_store(str(tmp_path / "file/runs")).check_writable()


def test_a_folder_instead_of_a_file_is_not_to_be_removed(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as raised:
        read_input(str(tmp_path))
    assert str(raised.value) == f"{tmp_path} is a folder, but should be a file; check the path."


@pytest.mark.parametrize(
    ("folder", "what"),
    [
        ("/proc/runs", "/proc/runs cannot be written: no folder and no file can be made there; choose another place."),
        ("{}/file", "{}/file is a file, but should be a folder; remove it or choose another place."),
        ("{}/file/runs", "{}/file/runs is below a file, not below a folder; check the path."),
        ("{}/file/runs/mine", "{}/file/runs/mine is below a file, not below a folder; check the path."),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_without_the_file_that_was_tried(
    tmp_path: Path, folder: str, what: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    if folder.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    with pytest.raises(StorageError) as raised:
        open_store(folder.format(tmp_path)).check_writable()
    assert str(raised.value) == what.format(tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_file_that_its_folder_cannot_take_is_said_to_be_none() -> None:
    says = "^/proc/rows.csv cannot be written: no file can be made there; choose another place.$"
    with pytest.raises(StorageError, match=says):
        write_output("/proc/rows.csv", b"")
    with pytest.raises(StorageError, match=says), new_output("/proc/rows.csv") as file:
        file.write_bytes(b"")


def test_a_folder_without_permission_to_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:  # root, whom tests may run as, may write to every folder
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.makedirs", refuse)
    with pytest.raises(StorageError, match=f"no permission to write to {tmp_path}; change the permissions"):
        open_store(str(tmp_path)).check_writable()


# URLs.


@pytest.mark.parametrize(
    "url", ["s3://AKIAKEY:hunter2@bucket/data", "s3://AKIAKEY%3Ahunter2@bucket", "https://AKIAKEY:hunter2@host/bucket"]
)
def test_a_url_with_credentials_is_refused_without_showing_them(url: str) -> None:
    with pytest.raises(UsageError, match="must not contain credentials") as raised:
        open_store(url)
    assert "hunter2" not in str(raised.value) and "AKIAKEY" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["abfs://bucket/data", "https://host/bucket", "s3://", "s3:///prefix", "s3://bucket//prefix"]
)
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="s3://bucket/prefix"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://bucket/a/../b", "gs://bucket/./b", "az://container/a/..", "s3://bucket/a\nb"])
def test_a_url_with_a_folder_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"has \. or \.\. as the name of a folder, or a control character"):
        open_store(url)


# The AWS configuration.


def write_aws_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch, config: str, credentials: str) -> None:
    for name, text in (("AWS_CONFIG_FILE", config), ("AWS_SHARED_CREDENTIALS_FILE", credentials)):
        (folder / name).write_text(text)
        monkeypatch.setenv(name, str(folder / name))


def test_a_profile_names_endpoint_region_and_keys(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = s3_server.environment()
    config = f"[profile lab]\nregion = eu-lab-1\nendpoint_url = {there['AWS_ENDPOINT_URL']}\n"
    keys = (
        f"aws_access_key_id = {there['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {there['AWS_SECRET_ACCESS_KEY']}\n"
    )
    write_aws_configuration(tmp_path, monkeypatch, config, f"[lab]\n{keys}")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = open_store("s3://tests/of-a-profile")
    store.put("a", b"1")
    assert store.cloud == S3(there["AWS_ENDPOINT_URL"], "eu-lab-1")
    assert (s3_server.directory / "tests/of-a-profile/a").read_bytes() == b"1"


def test_each_region_of_amazon_has_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for region, endpoint in (
        ("us-east-1", None),
        ("eu-central-1", None),
        ("cn-north-1", "https://s3.cn-north-1.amazonaws.com.cn"),  # obstore would ask s3.cn-north-1.amazonaws.com
    ):
        monkeypatch.setenv("AWS_REGION", region)
        cloud = S3.configured("s3://bucket")
        assert (cloud.region, cloud.endpoint_url, cloud.is_amazon) == (region, endpoint, True)
        assert cloud.obstore_config("bucket").get("endpoint") == endpoint


def test_the_more_specific_endpoint_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endpoint() -> str | None:
        cloud = open_store("s3://bucket").cloud
        assert cloud is not None
        return cloud.endpoint_url

    config = (
        "[default]\nendpoint_url = http://profile:1\nservices = mine\n"
        "[services mine]\ns3 =\n  endpoint_url = http://service:1\n"
    )
    assert endpoint() is None
    write_aws_configuration(tmp_path, monkeypatch, config, "")
    assert endpoint() == "http://service:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    assert endpoint() == "http://all:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:1")
    assert endpoint() == "http://s3:1"


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:9000", "http://localhost:PORT", "http://localhost:90000", "http://:9000", "http://[::1:9000"],
)
def test_an_invalid_endpoint_url_is_reported(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    for url, variable in (("s3://bucket", "AWS_ENDPOINT_URL"), ("az://images", "AZURE_STORAGE_ENDPOINT")):
        monkeypatch.setenv(variable, endpoint)
        with pytest.raises(UsageError, match=re.escape(f"{variable} is {endpoint!r}; it must look like https://host")):
            open_store(url)


def test_an_unknown_profile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "lba")
    with pytest.raises(StorageError, match=r"no profile lba; check AWS_PROFILE") as raised:
        open_store("s3://bucket")
    assert sentence(raised)


@pytest.mark.parametrize("content", [None, b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n"])
def test_unreadable_certificates_are_reported(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    store = scripted("https://127.0.0.1:9")
    for ask in (store.check_readable, lambda: store.get("a"), lambda: store.exists("a")):
        with pytest.raises(
            StorageError, match=f"AWS_CA_BUNDLE is {bundle}, which contains no readable certificates"
        ) as raised:
            ask()
        assert sentence(raised)


def test_given_credentials_override_the_environment(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = s3.environment()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "else")
    keys = Credentials(there["AWS_ACCESS_KEY_ID"], there["AWS_SECRET_ACCESS_KEY"])
    open_store(s3_url, source(keys)).put("a", b"1")
    with pytest.raises(StorageError, match="does not know the access key …body"):
        open_store(s3_url).put("a", b"1")
    open_store(s3_url, source(keys)).put("a", b"2")


# Errors of a healthy server.


def test_a_missing_bucket_is_reported(s3: S3Server) -> None:
    store = open_store("s3://nobucket/data")
    for ask in (store.check_readable, store.check_writable, lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(StorageError, match=f"There is no bucket nobucket at {s3.endpoint_url}") as raised:
            ask()
        assert sentence(raised)
    (problem,) = store.get_many(["a"])
    assert isinstance(problem, StorageError)


def test_wrong_credentials_are_reported(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = "…" + s3.environment()["AWS_ACCESS_KEY_ID"][-4:]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-one")
    with pytest.raises(StorageError, match=f"secret key does not belong to the access key {identity}") as raised:
        open_store(s3_url).check_readable()
    assert sentence(raised)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
    with pytest.raises(StorageError, match=f"{s3.endpoint_url} does not know the access key …BODY") as raised:
        open_store(s3_url).check_readable()
    assert sentence(raised)


def test_missing_credentials_are_reported(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(f"{s3_url}/data")
    for ask in (store.check_readable, store.check_writable, store.has_conditional_puts):
        with pytest.raises(
            StorageError, match=f"no AWS credentials for {s3_url}/data; set AWS_ACCESS_KEY_ID"
        ) as raised:
            ask()
        assert sentence(raised)


def test_a_check_that_is_refused_names_the_folder_and_not_its_own_object() -> None:
    with scripted_s3(lambda request: refusal(403, "AccessDenied")) as (url, _):
        store = scripted(url)
        for check in (store.check_readable, store.check_writable, store.has_conditional_puts):
            with pytest.raises(StorageError, match=f"has no permission for {store.url};"):
                check()


def test_an_endpoint_that_cannot_be_reached_is_reported() -> None:
    for ask in ("check_readable", "check_writable"):
        with pytest.raises(
            StorageError, match=r"http://127.0.0.1:9 cannot be reached: nothing answers there"
        ) as raised:
            getattr(scripted("http://127.0.0.1:9"), ask)()
        assert sentence(raised)
    with pytest.raises(StorageError, match="there is no such host") as raised:
        scripted("http://no-such-host.invalid:9").check_readable()
    assert sentence(raised)


def test_https_to_an_http_server_is_reported() -> None:
    with (
        scripted_s3(lambda request: Answer()) as (url, _),
        pytest.raises(StorageError, match="does not speak https") as raised,
    ):
        scripted(url.replace("http:", "https:")).check_readable()
    assert sentence(raised)


@pytest.mark.parametrize("ask", ["check_readable", "check_writable"])
def test_checks_fail_fast_if_the_server_is_busy(ask: str) -> None:
    with scripted_s3(lambda request: refusal(503, "SlowDown")) as (url, requests):
        with pytest.raises(StorageError, match="too busy"):
            getattr(scripted(url), ask)()
        assert len(requests) == 3


def test_an_error_of_the_credential_source_is_reported_unchanged() -> None:
    def broken() -> Credentials | None:
        raise StorageError("The driver is gone.")

    with (
        scripted_s3(lambda request: Answer()) as (url, _),
        pytest.raises(StorageError, match=r"^The driver is gone\.$"),
    ):
        scripted(url, broken).get("a")


# Errors of a busy, broken or remote server.


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refusal(403, "AccessDenied"), "access key …KEY1 has no permission for s3://bucket/prefix"),
        (Answer(403), "access key …KEY1 has no permission for s3://bucket/prefix"),
        (refusal(400, "ExpiredToken"), "session of the access key …KEY1 has expired; sign in"),
        (refusal(400, "InvalidToken"), "session token does not belong to the access key …KEY1"),
        (refusal(403, "RequestTimeTooSkewed"), "clock is wrong"),
        (refusal(301, "PermanentRedirect"), "bucket bucket is in another region .* set AWS_REGION"),
        (
            refusal(400, "AuthorizationHeaderMalformed", "wrong; expecting 'eu-west-1'"),
            "in the region eu-west-1; set AWS_REGION=eu-west-1",
        ),
        (refusal(503, "SlowDown"), "too busy"),
        (refusal(403, "InvalidObjectState"), r"prefix is archived \(S3 Glacier\); restore it"),
        (refusal(403, "SecondLevelDomainForbidden"), "addressing_style = virtual .* and not by an IP address"),
        (refusal(400, "KMS.DisabledException"), "KMS key that encrypts s3://bucket/prefix; enable that key"),
        (refusal(403, "AccessDenied", "not authorized to perform: kms:Decrypt on the resource"), "grant kms:Decrypt"),
        (refusal(400, "Oddity", "Nobody has seen this."), "cannot be used: Nobody has seen this"),
        (Answer(404, b"<html>Welcome to nginx!</html>"), "does not answer as S3 does; check AWS_ENDPOINT_URL"),
    ],
)
def test_an_error_response_becomes_one_sentence(answer: Answer, expected: str) -> None:
    with scripted_s3(lambda request: answer) as (url, _), pytest.raises(StorageError, match=expected) as raised:
        scripted(url).check_readable()
    assert sentence(raised)


def test_an_archived_object_is_a_bad_image_and_not_the_end() -> None:
    def answer(request: Request) -> Answer:
        return refusal(403, "InvalidObjectState") if "old" in request.path else Answer(body=b"no image")

    images = Manifest(
        keys=pa.array(["a/new.png", "a/old.png"], pa.large_string()),
        labels=np.zeros(2, np.int32),
        sizes_bytes=np.ones(2, np.int64),
        etags=pa.array(["", ""], pa.large_string()),
        classes=("a",),
        url="s3://bucket/prefix",
    )
    with scripted_s3(answer) as (url, _):
        _, bad = ImageReader(scripted(url), ImageShape(4, 4, 3)).read(images)
    assert bad == {
        0: "the file is text, such as an error of a server or a path",
        1: "the object is archived; restore it first",
    }


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "failure", [refusal(503, "SlowDown"), refusal(500, "InternalError"), Answer(cut_after_bytes=0)]
)
def test_transient_failures_are_retried(failure: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Real waits, of up to a tenth of a second and more for each of 30 requests, would take several seconds.
    monkeypatch.setattr(retries_and_hedges, "INITIAL_WAIT_S", 0.001)
    with scripted_s3(lambda request: failure if request.number % 3 else Answer(body=b"1")) as (url, requests):
        assert scripted(url).get_many([str(i) for i in range(20)]) == [b"1"] * 20
    assert len(requests) > 20


def test_a_download_that_breaks_off_is_retried() -> None:
    def answer(request: Request) -> Answer:
        return Answer(body=b"0123456789", cut_after_bytes=4 if request.number < 3 else None)

    with scripted_s3(answer) as (url, _):
        assert scripted(url).get("a") == b"0123456789"


def test_a_multipart_upload_whose_response_was_lost_is_retried() -> None:
    started, done = Counter[str](), Counter[str]()

    def answer(request: Request) -> Answer:
        query = urlsplit(request.path).query
        if request.method == "POST" and "uploadId" not in query:
            started["uploads"] += 1
            return Answer(body=b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
        if request.method == "POST":
            done["asked"] += 1
            lost = {1: Answer(cut_after_bytes=0), 2: refusal(404, "NoSuchUpload")}
            whole = b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
            return lost.get(done["asked"], Answer(body=whole))
        return Answer()

    with scripted_s3(answer) as (url, _):
        scripted(url).put("a", bytes(12_000_000))
    assert (started["uploads"], done["asked"]) == (2, 3)


@pytest.mark.not_quick
def test_an_interrupted_listing_continues_at_the_same_page() -> None:
    keys = [f"prefix/{folder}/{i:03d}" for folder in "abc" for i in range(150)]
    seen: dict[str, int] = {}

    def answer(request: Request) -> Answer:
        seen[request.path] = seen.get(request.path, 0) + 1
        return Answer(body=listing(keys, request), cut_after_bytes=100 if seen[request.path] == 1 else None)

    with scripted_s3(answer) as (url, _):
        assert sorted(f"prefix/{found.path}" for found in scripted(url).list()) == keys
    assert [path for path in seen if "start-after" in path]


def test_folder_markers_of_s3_consoles_are_ignored() -> None:
    keys = ["prefix/", "prefix/cat/", "prefix/cat/1.jpg"]
    with scripted_s3(lambda request: Answer(body=listing(keys, request))) as (url, _):
        assert [found.path for found in scripted(url).list()] == ["cat", "cat/1.jpg"]


def test_expired_credentials_are_renewed_once_for_all_threads() -> None:
    asked: list[Credentials] = []

    def keys() -> Credentials:
        asked.append(NEW_SESSION if asked else OLD_SESSION)
        return asked[-1]

    def answer(request: Request) -> Answer:
        return Answer(body=b"1") if request.access_key_id == NEW_SESSION.access_key_id else refusal(400, "ExpiredToken")

    with scripted_s3(answer) as (url, _):
        store = scripted(url, keys)
        assert store.get_many([str(i) for i in range(200)]) == [b"1"] * 200
        assert asked == [OLD_SESSION, NEW_SESSION]


def issuer(lifetime_s: float) -> tuple[dict[str, datetime], Callable[[], Credentials]]:
    """When the keys that were issued expire, and the function that issues them."""
    issued: dict[str, datetime] = {}

    def issue() -> Credentials:
        name, expires_at = f"ASIA{len(issued)}", datetime.now(timezone.utc) + timedelta(seconds=lifetime_s)
        issued[name] = expires_at
        return Credentials(name, "secret", "token", expires_at)

    return issued, issue


@pytest.mark.not_quick
def test_credentials_are_renewed_before_they_expire() -> None:
    asked, keys = issuer(lifetime_s=2)

    def answer(request: Request) -> Answer:
        name = request.access_key_id
        return Answer(body=name.encode()) if datetime.now(timezone.utc) < asked[name] else refusal(403, "AccessDenied")

    with scripted_s3(answer) as (url, _):
        store = scripted(url, keys)
        deadline = time.monotonic() + 20
        while store.get("a") != b"ASIA2" and time.monotonic() < deadline:
            pass
    assert len(asked) == 3


@pytest.mark.not_quick
def test_get_many_succeeds_while_credentials_expire() -> None:
    issued, keys = issuer(lifetime_s=1)

    def answer(request: Request) -> Answer:
        expired = datetime.now(timezone.utc) >= issued[request.access_key_id]
        return refusal(400, "ExpiredToken") if expired else Answer(body=request.path.encode())

    paths = [f"{number:03d}" for number in range(100)]
    with scripted_s3(answer) as (url, requests):
        store = scripted(url, keys)
        deadline = time.monotonic() + 30
        while len(issued) < 4 and time.monotonic() < deadline:
            assert store.get_many(paths) == [f"/bucket/prefix/{path}".encode() for path in paths]
    assert len(issued) >= 4 and len({request.access_key_id for request in requests}) >= 4


def test_credentials_of_a_credential_process_work_until_they_are_revoked(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(tmp_path)
    with issuing_s3(s3, issuer) as url:
        for name in s3.environment():
            monkeypatch.delenv(name)
        for name, value in issuer.environment(url).items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://tests/issued")
        store.put("a", b"1")
        assert store.get("a") == b"1" and issuer.issued()
        issuer.revoke()
        with pytest.raises(StorageError, match=r"could not be obtained \(.*AssumeRole") as raised:
            store.get("a")
        assert sentence(raised)
        issuer.revoke(False)
        assert store.get("a") == b"1"


def test_revoked_credentials_are_reported_by_identity_without_endless_renewals() -> None:
    revoked = threading.Event()
    asked: list[int] = []

    def keys() -> Credentials:
        asked.append(1)
        return KEYS

    with scripted_s3(lambda request: refusal(403, "InvalidAccessKeyId") if revoked.is_set() else Answer(body=b"1")) as (
        url,
        requests,
    ):
        store = scripted(url, keys)
        assert store.get_many(["a"] * 10) == [b"1"] * 10
        revoked.set()
        problems = store.get_many(["a"] * 100)
        (said,) = {str(problem) for problem in problems}
        sentence = "does not know the access key …KEY1; check AWS_ACCESS_KEY_ID, or the profile that AWS_PROFILE names."
        assert said == f"{url} {sentence}"
        assert all(isinstance(problem, StorageError) for problem in problems)
        assert len(requests) <= 10 + 2 * 120 and len(asked) <= 1 + 120, "some may be sent again, being slow"


def test_a_store_and_its_copies_use_one_client_per_process() -> None:
    asked: list[int] = []

    def keys() -> Credentials:
        asked.append(1)
        return KEYS

    with scripted_s3(lambda request: Answer(body=b"1")) as (url, _):
        store = scripted(url, keys)
        for copy in (store, store, store):
            copy.get("a")
        scripted(url, keys).get("a")
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (botocore_error("AccessDenied"), "no permission for s3://bucket/data"),
        (botocore_error("ExpiredToken"), "has expired; sign in"),
        (error_in_200("AccessDenied"), "no permission for s3://bucket/data"),
        (exceptions.SSLError(endpoint_url="https://x", error="self-signed"), "certificate of .* cannot be trusted"),
        (
            UnauthenticatedError("for path External AWS credential provider: RuntimeError: no luck\n\nDebug"),
            r"could not be obtained \(RuntimeError: no luck\)",
        ),
        (exceptions.NoCredentialsError(), "no AWS credentials for s3://bucket/data"),
        (
            exceptions.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
            "incomplete: AWS_SECRET_ACCESS_KEY is missing",
        ),
        (exceptions.SSOTokenLoadError(error_msg="x"), "sign-in has expired"),
        (
            exceptions.CredentialRetrievalError(provider="container-role", error_msg="no luck"),
            r"could not be obtained \(.*no luck",
        ),
        (
            exceptions.CredentialRetrievalError(
                provider="custom-process", error_msg="(AccessDenied) when calling AssumeRole"
            ),
            r"could not be obtained \(.*AssumeRole",
        ),
        (exceptions.EndpointConnectionError(endpoint_url="http://x"), "cannot be reached"),
        (
            GenericError("error sending request\n\nerror: InvalidCertificate(UnknownIssuer)"),
            "certificate of .* cannot be trusted",
        ),
        (OSError(30, "Read-only file system"), "s3://bucket/data is on a read-only disk"),
        (OSError(5, "Input/output error"), "cannot be used: Input/output error"),
        (RuntimeError("odd {thing}\nmore"), r"cannot be used: RuntimeError: odd \{thing\}\.$"),
    ],
)
def test_other_errors_become_one_sentence(error: Exception, expected: str) -> None:
    with pytest.raises(StorageError, match=expected) as raised:
        raise explain(error, "s3://bucket/data", S3())
    assert sentence(raised)


def test_explaining_a_storage_error_returns_it() -> None:
    error = StorageError("Said already.")
    assert explain(error, "s3://bucket") is error


@pytest.mark.parametrize("cloud", ["azure", "google"])
def test_of_two_conditional_writes_one_is_refused(
    cloud: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(request.getfixturevalue(f"{cloud}_url"))
    with caplog.at_level(logging.WARNING, "raytrain"):
        assert store.has_conditional_puts()
    store.put_if("a", b"1", None)
    for expected in (None, b"0"):
        with pytest.raises(ObjectChanged):
            store.put_if("a", b"2", expected)
    store.put_if("a", b"2", b"1")
    assert store.get("a") == b"2" and list(store.list()) and not caplog.messages


# What AWS configurations ask for.


def test_proxies_are_not_asked_for_servers_on_this_machine(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    open_store(s3_url).put("a", b"1")
    assert [found.path for found in open_store(s3_url).list()] == ["a"]
    assert raytrain.filesystem(s3_url).cat_file(f"{s3_url}/a") == b"1" == read_input(f"{s3_url}/a")


def test_a_bucket_can_be_a_part_of_the_hosts_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_text = "[default]\nendpoint_url = http://host:1\ns3 =\n  addressing_style = virtual\n"
    write_aws_configuration(tmp_path, monkeypatch, config_text, "")
    cloud = S3.configured("s3://mine/x")
    assert cloud == S3("http://host:1", virtual_hosted=True)
    config = cloud.obstore_config("mine")
    assert (config["endpoint"], config["virtual_hosted_style_request"]) == ("http://mine.host:1", True)
    assert cloud.boto_config()["s3"] == {"addressing_style": "virtual"}
    write_aws_configuration(tmp_path, monkeypatch, config_text.replace("host", "127.0.0.1"), "")
    assert not S3.configured("s3://mine/x").virtual_hosted, "there is no host mine.127.0.0.1"


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("variable", "header", "sent"),
    [("AWS_SKIP_SIGNATURE=true", "Authorization", False), ("AWS_REQUEST_PAYER=requester", "x-amz-request-payer", True)],
)
def test_public_buckets_and_those_whose_readers_pay_are_read_everywhere(
    variable: str, header: str, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: Request) -> Answer:
        content = b"" if request.method == "HEAD" else b"1"
        return Answer(body=listing(["a//b", "c"], request) if "list-type" in request.path else content)

    with scripted_s3(answer) as (url, requests):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        if sent:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-one")
        with monkeypatch.context() as here:
            here.setenv(*variable.split("="))
            store = pickle.loads(pickle.dumps(open_store("s3://bucket")))
            assert read_input("s3://bucket/c") == b"1" == raytrain.filesystem("s3://bucket").cat_file("bucket/c")
        assert store.get("c") == b"1" and [found.path for found in store.list()] == ["c"]  # as on another machine
    assert {header in request.headers for request in requests} == {sent}


def test_a_panic_of_obstore_is_an_error_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as pyo3's, which is no Exception
        pass

    def panic(*_: object) -> bool:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("raytrain.storage.bucket.with_retries", panic)
    with pytest.raises(StorageError, match=r"s3://bucket/prefix/a cannot be used: PanicException: called `Option::unw"):
        scripted("http://127.0.0.1:1").get("a")
