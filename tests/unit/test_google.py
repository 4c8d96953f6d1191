"""Google Cloud Storage: its settings, credentials and errors, against a stand-in for the server."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import google.auth
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.auth.exceptions import DefaultCredentialsError

import raytrain
from raytrain.errors import StorageError, UsageError
from raytrain.storage.bucket import BucketStore
from raytrain.storage.clouds.google import Google
from raytrain.storage.credentials import GoogleCredentials, credentials_of_fields
from raytrain.storage.lent_credentials import CredentialBroker
from raytrain.storage.open import new_output, open_store, read_input, write_output
from raytrain.storage.store import ObjectChanged, Store
from tests.helpers.google_storage import GoogleStorage
from tests.helpers.scripted_s3 import Answer, Request, refusal, scripted_s3

pytestmark = pytest.mark.not_quick  # they talk to a server of the cloud's kind

OLD, NEW = GoogleCredentials("old-token"), GoogleCredentials("new-token")


def scripted(endpoint_url: str, keys: Callable[[], GoogleCredentials | None] = lambda: NEW) -> Store:
    return open_store("gs://tests/x", keys, Google(endpoint_url))


# Settings and credentials.


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("", None), ("localhost:9023", "http://localhost:9023"), ("http://localhost:9023/", "http://localhost:9023")],
)
def test_an_emulator_takes_the_place_of_google(
    variable: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", variable)
    assert open_store("gs://images").cloud == Google(expected)


def test_an_emulator_is_shown_no_credentials(
    google: GoogleStorage, google_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json")
    open_store(google_url).put("a", b"1")
    assert set(google.shown) == {"anonymous"}


def service_account(folder: Path, token_url: str) -> str:
    """The file of a service account whose tokens are issued at ``token_url``."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    about = {"type": "service_account", "client_email": "me@mine", "private_key": text, "token_uri": token_url}
    (folder / "account.json").write_text(json.dumps({**about, "project_id": "mine"}))
    return str(folder / "account.json")


@pytest.mark.not_quick
def test_a_service_account_gives_tokens_that_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives_s = iter([3600, 60, 3600])  # one that is about to expire counts as none

    def issue(_: object) -> Answer:
        life_s = next(lives_s)
        token = {"access_token": f"token-of-{life_s}", "expires_in": life_s, "token_type": "Bearer"}
        return Answer(body=json.dumps(token).encode(), headers={"Content-Type": "application/json"})

    with scripted_s3(issue) as (url, requests):
        for folder in (tmp_path / "long", tmp_path / "short"):
            folder.mkdir()
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", service_account(folder, f"{url}/token"))
            found = [Google().credentials() for _ in range(2)]
            assert all(each is not None and each.expires_at is not None for each in found)
        assert len(requests) == 3
    assert [each and each.token for each in found] == ["token-of-60", "token-of-3600"]


@pytest.mark.parametrize("content", ["{}", "no json"])
def test_a_file_that_is_none_is_reported(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "account.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    with pytest.raises(StorageError, match=r"Google gave no access token \(.*\); check GOOGLE_APPLICATION_CREDENTIALS"):
        open_store("gs://images").get("a")


def test_a_sign_in_that_is_refused_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Answer(400, b'{"error": "invalid_grant", "error_description": "Account deleted"}')
    with scripted_s3(lambda request: refused) as (url, _):
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", service_account(tmp_path, f"{url}/token"))
        with pytest.raises(StorageError, match=r"Google gave no access token \(invalid_grant: Account deleted\)"):
            open_store("gs://images").get("a")


def test_a_file_that_was_replaced_after_its_account_was_refused_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def issue(request: Request) -> Answer:
        if request.path == "/old":
            return Answer(400, b'{"error": "invalid_grant"}')
        return Answer(body=b'{"access_token": "new", "expires_in": 3600}', headers={"Content-Type": "application/json"})

    with scripted_s3(issue) as (url, _):
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", service_account(tmp_path, f"{url}/old"))
        with pytest.raises(StorageError, match="Google gave no access token"):
            Google().credentials()
        service_account(tmp_path, f"{url}/new")
        assert Google().credentials() == GoogleCredentials("new", ANY)


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_found(scopes: object) -> None:
        raise DefaultCredentialsError("Nothing found.")

    monkeypatch.setattr(google.auth, "default", nothing_found)
    with pytest.raises(StorageError, match=r"no Google credentials for gs://images/a; .* raytrain\[gcs\] \(.* and set"):
        open_store("gs://images").get("a")


def test_their_text_shows_no_secret_and_they_cannot_be_pickled() -> None:
    assert repr(NEW) == "GoogleCredentials(access token, expires_at=None)"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(NEW)
    assert credentials_of_fields("gs", NEW.fields()) == NEW


def test_a_refused_token_is_replaced_by_a_new_one(google: GoogleStorage) -> None:
    google.tokens = {"new-token"}
    tokens = iter([OLD, NEW])
    store = scripted(google.endpoint_url, lambda: next(tokens))
    store.put("a", b"1")
    assert store.get("a") == b"1" and google.shown == ["old-token", "new-token", "new-token"]


def test_lent_tokens_are_used(google: GoogleStorage) -> None:
    google.tokens = {"new-token"}
    broker = CredentialBroker()
    broker.lend("ticket", "gs", NEW.fields())
    store = open_store("gs://tests/x").with_lent_credentials(broker.source)
    assert isinstance(store, BucketStore)
    store.put("a", b"1")
    assert store.get("a") == b"1"


# Errors.


def test_a_missing_bucket_is_reported(google: GoogleStorage) -> None:
    store = open_store("gs://nowhere/x")
    expected = rf"There is no bucket nowhere at {google.endpoint_url}; check the name, or create it\."
    for request in (store.check_readable, store.check_writable, lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(StorageError, match=expected):
            request()


def test_a_token_that_stays_refused_is_reported(google: GoogleStorage) -> None:
    store = scripted(google.endpoint_url)
    for request in (store.check_readable, store.check_writable, lambda: store.get("a")):
        with pytest.raises(StorageError, match="does not accept the access token; check GOOGLE_APPLICATION_CREDEN"):
            request()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refusal(403, "AccessDenied"), "The access token has no permission for gs://tests/x/a; give its owner"),
        (refusal(400, "InvalidArgument", "Words."), r"gs://tests/x/a cannot be used: Words\.$"),
    ],
)
def test_an_error_response_becomes_one_sentence(answer: Answer, expected: str) -> None:
    with scripted_s3(lambda request: answer) as (url, _), pytest.raises(StorageError, match=expected):
        scripted(url).get("a")


def test_transient_failures_are_retried() -> None:
    busy = refusal(503, "ServiceUnavailable")
    about = {"ETag": '"1"', "Last-Modified": "Mon, 23 Nov 2026 04:00:00 GMT"}
    with scripted_s3(lambda request: busy if request.number < 3 else Answer(body=b"1", headers=about)) as (url, asked):
        assert scripted(url).get("a") == b"1"
    assert len(asked) == 4


@pytest.mark.parametrize("url", ["gs://", "gs://images//train", "gs://images@host/x", "gs://images/x?token=hunter2"])
def test_urls_of_another_form_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"write .*gs://bucket/prefix") as raised:
        open_store(url)
    assert "hunter2" not in str(raised.value)


# Writes and files.


def test_a_write_that_lost_a_race_is_refused(google: GoogleStorage, google_url: str) -> None:
    """The object is replaced between the read and the write of a conditional write, with the same content at last."""
    store, other = open_store(google_url), open_store(google_url)
    store.put("a", b"1")

    def overtake() -> None:
        google.before_conditional_put = lambda: None
        other.put("a", b"1")

    google.before_conditional_put = overtake
    with pytest.raises(ObjectChanged):
        store.put_if("a", b"2", b"1")
    assert store.get("a") == b"1"


@pytest.mark.not_quick
def test_commands_and_notebooks_read_and_write_files(google_url: str) -> None:
    write_output(f"{google_url}/x.csv", b"a,b\n")
    with new_output(f"{google_url}/y.bin") as file:
        file.write_bytes(bytes(6_000_000))
    assert read_input(f"{google_url}/x.csv") == b"a,b\n" and len(read_input(f"{google_url}/y.bin")) == 6_000_000
    with pytest.raises(StorageError, match=f"There is no file {google_url}/z.csv; check the path"):
        read_input(f"{google_url}/z.csv")
    files = pickle.loads(pickle.dumps(raytrain.filesystem(google_url)))
    assert sorted(files.ls(google_url, detail=False)) == [f"{google_url[5:]}/{name}" for name in ("x.csv", "y.bin")]
    with files.open(f"{google_url}/x.csv") as opened:
        assert opened.read() == b"a,b\n"
