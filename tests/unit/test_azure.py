"""Azure Blob Storage: its settings, credentials and errors. tests/unit/test_storage.py has what all stores do."""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import azure.identity
import pandas
import pytest
from azure.core.exceptions import ClientAuthenticationError

import raytrain
from raytrain.errors import StorageError, UsageError
from raytrain.storage.bucket import BucketStore
from raytrain.storage.clouds import azure as azure_cloud
from raytrain.storage.clouds.azure import Azure
from raytrain.storage.credentials import AzureCredentials, Credentials, credentials_of_fields
from raytrain.storage.lent_credentials import CredentialBroker
from raytrain.storage.open import new_output, open_store, read_input, write_output
from raytrain.storage.store import Store
from tests.helpers.azurite import Azurite
from tests.helpers.scripted_s3 import Answer, Request, refusal, scripted_s3

pytestmark = pytest.mark.not_quick  # they talk to a server of the cloud's kind

OTHER_KEY = base64.b64encode(b"another key of 32 bytes in total").decode()
OLD, NEW = (AzureCredentials("token", name) for name in ("old-token", "new-token"))


def credentials_of(store: Store) -> AzureCredentials:
    assert isinstance(store, BucketStore)
    found = store.credentials()
    assert isinstance(found, AzureCredentials)
    return found


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")


@pytest.fixture(params=["azure.core.exceptions", "azure.identity"])  # another package may bring the first alone
def no_identity(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if raytrain[azure] were not installed."""
    azure_cloud.default_credential.cache_clear()
    monkeypatch.setitem(sys.modules, request.param, None)


# Settings.


def test_the_account_has_its_endpoint_at_azure_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"AZURE_STORAGE_ACCOUNT_NAME is not set; .* az://images/train"):
        open_store("az://images/train")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    assert open_store("az://images").cloud == Azure("mine", "https://mine.blob.core.windows.net")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:10000/mine/")
    assert open_store("az://images").cloud == Azure("mine", "http://127.0.0.1:10000/mine")


def test_an_endpoint_that_may_contain_a_signature_is_refused_without_showing_it(
    account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://mine.blob.core.windows.net/?sig=hunter2")
    with pytest.raises(UsageError, match="AZURE_STORAGE_ENDPOINT must look like") as raised:
        open_store("az://images")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("az://", "has no bucket; write az://container/prefix"),
        ("az://images//train", "write az://container/prefix with single slashes"),
        ("az://images@mine.blob.core.windows.net/x", "must not contain credentials"),
        ("az://images/x?sig=hunter2", "must not contain credentials"),
        ("abfs://images/x", "must start with s3://, gs:// or az://"),
    ],
)
def test_urls_of_another_form_are_refused(url: str, expected: str, account: None) -> None:
    with pytest.raises(UsageError, match=expected) as raised:
        open_store(url)
    assert "hunter2" not in str(raised.value)


# Credentials.


def test_the_key_comes_first_then_the_signature_then_the_sign_in(
    account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires_at = datetime(2199, 1, 1, tzinfo=timezone.utc)
    token = SimpleNamespace(token="of-az-login", expires_on=expires_at.timestamp())
    monkeypatch.setattr(azure_cloud, "default_credential", lambda: SimpleNamespace(get_token=lambda scope: token))
    store = open_store("az://images")
    assert credentials_of(store) == AzureCredentials("token", "of-az-login", expires_at)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=2")
    assert credentials_of(store) == AzureCredentials("sas_token", "sv=1&sig=2")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", OTHER_KEY)
    assert credentials_of(store) == AzureCredentials("access_key", OTHER_KEY)


def test_their_text_shows_no_secret_and_they_cannot_be_pickled() -> None:
    keys = AzureCredentials("access_key", OTHER_KEY)
    assert repr(keys) == "AzureCredentials(account key, expires_at=None)"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(keys)
    assert credentials_of_fields("az", keys.fields()) == keys


def test_missing_credentials_are_reported(azure_url: str, no_identity: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    expected = f"There are no Azure credentials for {azure_url}/a; set AZURE_STORAGE_ACCOUNT_KEY .* raytrain\\[azure\\]"
    with pytest.raises(StorageError, match=expected):
        open_store(azure_url).get("a")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("DefaultAzureCredential failed.\n\tAzureCliCredential: not signed in", "There are no Azure credentials for"),
        (
            "EnvironmentCredential: Authentication failed: AADSTS7000215: Invalid client secret provided.\nTo fix",
            r"Azure refuses the sign-in \(AADSTS7000215: Invalid client secret provided\); sign in again\.$",
        ),
    ],
)
def test_a_sign_in_that_fails_is_reported_and_the_next_one_counts(
    reason: str, expected: str, account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(scope: str) -> None:
        raise ClientAuthenticationError(reason)

    azure_cloud.default_credential.cache_clear()
    monkeypatch.setattr(azure.identity, "DefaultAzureCredential", lambda: SimpleNamespace(get_token=refused))
    store = open_store("az://images")
    with pytest.raises(StorageError, match=expected):
        store.get("a")
    signed_in = SimpleNamespace(get_token=lambda scope: SimpleNamespace(token="new", expires_on=7e9))
    monkeypatch.setattr(azure.identity, "DefaultAzureCredential", lambda: signed_in)
    assert credentials_of(store).secret == "new"
    azure_cloud.default_credential.cache_clear()


def test_a_key_that_is_none_is_reported_without_showing_it(azure_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "hunter2!")
    with pytest.raises(StorageError, match="AZURE_STORAGE_ACCOUNT_KEY is not the key") as raised:
        open_store(azure_url).get("a")
    assert "hunter2" not in str(raised.value)


def test_a_shared_access_signature_allows_what_it_says(
    azure: Azurite, azure_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(azure_url).put("a", b"1")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", azure.signature("rl"))
    reader = open_store(azure_url)
    assert reader.get("a") == b"1" and [found.path for found in reader.list()] == ["a"]
    with pytest.raises(StorageError, match=f"The shared access signature has no permission for {azure_url}/b; give it"):
        reader.put("b", b"2")


def test_a_refused_token_is_replaced_by_a_new_one() -> None:
    def answer(request: Request) -> Answer:
        return refusal(401, "InvalidAuthenticationInfo") if request.number == 0 else Answer(body=b"content")

    tokens = iter([OLD, NEW])
    with scripted_s3(answer) as (url, requests):
        store = open_store("az://images", lambda: next(tokens), Azure("mine", url))
        assert store.get("a") == b"content"
    assert len(requests) == 2


def test_tokens_are_renewed_before_they_expire() -> None:
    def issued() -> Iterator[AzureCredentials]:
        for number in range(9):
            yield AzureCredentials("token", f"{number}", datetime.now(timezone.utc) + timedelta(seconds=-1))

    tokens = issued()
    with scripted_s3(lambda request: Answer(body=b"content")) as (url, _):
        store = open_store("az://images", lambda: next(tokens), Azure("mine", url))
        assert store.get("a") == b"content" == store.get("a")
    assert next(tokens).secret > "1"


def test_each_cloud_is_lent_its_own_credentials(account: None) -> None:
    broker = CredentialBroker()
    broker.lend("ticket", "s3", Credentials("AKIA", "s").fields())
    store = open_store("az://images").with_lent_credentials(broker.source)
    assert isinstance(store, BucketStore) and store.credentials() is None
    broker.lend("ticket", "az", NEW.fields())
    assert store.credentials() == NEW
    assert broker.credentials("ticket", "s3") == Credentials("AKIA", "s").fields()


# Errors.


def test_a_missing_container_is_reported(azure: Azurite) -> None:
    store = open_store("az://nowhere/x")
    expected = rf"There is no container nowhere at {azure.endpoint_url}; check the name, or create it\."
    for request in (store.check_readable, store.check_writable, lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(StorageError, match=expected):
            request()


def test_a_wrong_key_is_reported(azure_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", OTHER_KEY)
    store = open_store(azure_url)
    for request in (store.check_readable, store.check_writable, lambda: store.get("a")):
        with pytest.raises(StorageError, match="does not accept the account key; check AZURE_STORAGE") as raised:
            request()
        assert "\n" not in str(raised.value) and OTHER_KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refusal(403, "AuthorizationPermissionMismatch"), "has no permission for az://images/a; give it the role"),
        (refusal(403, "KeyBasedAuthenticationNotPermitted"), "allows no account keys; install raytrain"),
        (refusal(409, "ContainerBeingDeleted"), "The container images is being deleted"),
        (refusal(400, "InvalidHeaderValue", "Words."), r"az://images/a cannot be used: Words\.$"),
    ],
)
def test_an_error_response_becomes_one_sentence(answer: Answer, expected: str) -> None:
    with scripted_s3(lambda request: answer) as (url, _), pytest.raises(StorageError, match=expected):
        open_store("az://images", lambda: NEW, Azure("mine", url)).get("a")


def test_an_endpoint_that_cannot_be_reached_is_reported() -> None:
    store = open_store("az://images", lambda: NEW, Azure("mine", "http://127.0.0.1:9")).fail_fast()
    with pytest.raises(StorageError, match="nothing answers there; check AZURE_STORAGE_ENDPOINT"):
        store.get("a")


@pytest.mark.parametrize("failure", [refusal(503, "ServerBusy"), refusal(500, "OperationTimedOut")])
def test_transient_failures_are_retried(failure: Answer) -> None:
    with scripted_s3(lambda request: failure if request.number < 3 else Answer(body=b"1")) as (url, requests):
        assert open_store("az://images", lambda: NEW, Azure("mine", url)).get("a") == b"1"
    assert len(requests) == 4


# Files.


def test_the_file_system_reads_and_has_no_secret_in_its_pickle(azure: Azurite, azure_url: str) -> None:
    open_store(f"{azure_url}/first").put("metrics.jsonl", b'{"loss": 0.5}\n{"loss": 0.25}\n')
    assert azure.key.encode() not in pickle.dumps(open_store(azure_url))
    files = raytrain.filesystem(azure_url)
    with files.open(f"{azure_url}/first/metrics.jsonl") as file:
        assert pandas.read_json(file, lines=True)["loss"].tolist() == [0.5, 0.25]
    pickled = pickle.dumps(files)
    assert azure.key not in repr(files) + repr(vars(files)) and azure.key.encode() not in pickled
    copied = pickle.loads(pickled)
    assert copied.ls(f"{azure_url}/first", detail=False) == [f"{azure_url[5:]}/first/metrics.jsonl"]


def test_commands_read_and_write_files(azure_url: str) -> None:
    write_output(f"{azure_url}/x.csv", b"a,b\n")
    with new_output(f"{azure_url}/y.bin") as file:
        file.write_bytes(bytes(6_000_000))
    assert read_input(f"{azure_url}/x.csv") == b"a,b\n" and len(read_input(f"{azure_url}/y.bin")) == 6_000_000
    with pytest.raises(StorageError, match=f"There is no file {azure_url}/z.csv; check the path"):
        read_input(f"{azure_url}/z.csv")
    with pytest.raises(StorageError, match="There is no container nowhere"):
        write_output("az://nowhere/x.csv", b"")


def test_a_file_without_credentials_is_reported(
    azure_url: str, no_identity: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    with pytest.raises(StorageError, match=r"There are no Azure credentials for .*x.csv; set AZURE_"):
        read_input(f"{azure_url}/x.csv")
