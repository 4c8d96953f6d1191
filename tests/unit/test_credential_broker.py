"""The driver's credentials are lent to other processes, renewed in time, and stay in memory."""

from __future__ import annotations

import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest

from raytrain.storage import lent_credentials
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import CredentialCache, CredentialFields, Credentials
from raytrain.storage.lent_credentials import CredentialBroker, CredentialLender
from raytrain.storage.open import open_store
from tests.helpers.scripted_s3 import Answer, Request, scripted_s3
from tests.helpers.waiting import wait_for

TICKET = "of-the-run"
KEYS = Credentials("AKIAEXAMPLE1234", "canary-secret", "canary-token")


class Resolver:
    """A fake of this process's AWS configuration and of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.credentials: Credentials | None = KEYS
        self.error: Exception | None = None
        self.now_s = 1000.0
        monkeypatch.setattr(lent_credentials.time, "monotonic", lambda: self.now_s)

    def resolve(self) -> Credentials | None:
        if self.error is not None:
            raise self.error
        return self.credentials


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    return Resolver(monkeypatch)


def test_the_broker_returns_the_newest_credentials() -> None:
    broker = CredentialBroker()
    assert broker.source("s3") is None
    for lent in (KEYS, Credentials("AKIAOTHER", "s")):
        broker.lend(TICKET, "s3", lent.fields())
        assert broker.credentials(TICKET, "s3") == lent.fields() and broker.source("s3") == lent
    broker.lend(TICKET, "s3", None)
    assert broker.credentials(TICKET, "s3") is None and broker.source("s3") is None


def test_whoever_has_no_ticket_gets_no_credentials_and_cannot_replace_them() -> None:
    broker = CredentialBroker()
    for guess in ("", "guess"):
        with pytest.raises(PermissionError):
            broker.credentials(guess, "s3")
    broker.lend(TICKET, "s3", KEYS.fields())
    for guess in ("", "guess", "öf-the-run"):
        with pytest.raises(PermissionError):
            broker.credentials(guess, "s3")
        with pytest.raises(PermissionError):
            broker.lend(guess, "s3", None)
    assert broker.credentials(TICKET, "s3") == KEYS.fields()


def test_neither_the_broker_nor_its_source_can_be_pickled_with_credentials() -> None:
    broker = CredentialBroker()
    broker.lend(TICKET, "s3", KEYS.fields())
    for secret in (broker, broker.source):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(secret)


def test_credentials_are_lent_at_once_and_renewed_every_minute(resolver: Resolver) -> None:
    lent: list[CredentialFields | None] = []
    lender = CredentialLender(lambda _, fields: lent.append(fields), {"s3": resolver.resolve})
    assert lent == [KEYS.fields()]
    resolver.credentials = Credentials("AKIAREWRITTEN", "s")
    for resolver.now_s in (1001.0, 1059.0):
        lender.lend_if_due()
    assert len(lent) == 1
    resolver.now_s = 1061.0
    lender.lend_if_due()
    assert lent[1:] == [resolver.credentials.fields()]


def test_expiring_credentials_are_renewed_after_a_third_of_their_lifetime(resolver: Resolver) -> None:
    expires_at = datetime.now(timezone.utc) + timedelta(seconds=30)
    resolver.credentials = Credentials("ASIA", "s", "t", expires_at)
    lent: list[CredentialFields | None] = []
    lender = CredentialLender(lambda _, fields: lent.append(fields), {"s3": resolver.resolve})
    resolver.now_s += 5
    lender.lend_if_due()
    assert len(lent) == 1
    resolver.now_s += 6
    lender.lend_if_due()
    assert len(lent) == 2


def test_credentials_that_expire_while_the_machine_sleeps_are_replaced(resolver: Resolver) -> None:
    # The clock of timeouts, which stands still meanwhile, is that of ``resolver``.
    broker, expires_at = CredentialBroker(), datetime.now(timezone.utc) + timedelta(seconds=0.3)
    resolver.credentials = Credentials("ASIABEFORE", "s", "t", expires_at)
    lender, cache = (
        CredentialLender(partial(broker.lend, TICKET), {"s3": resolver.resolve}),
        CredentialCache(resolver.resolve),
    )
    assert cache()["access_key_id"] == "ASIABEFORE"
    wait_for(lambda: datetime.now(timezone.utc) > expires_at)

    resolver.credentials = after = Credentials("ASIAAFTER", "s", "t", expires_at + timedelta(hours=1))
    with ThreadPoolExecutor(2) as threads:  # who asks before the driver has lent others gets those
        asked = threads.submit(broker.credentials, TICKET, "s3"), threads.submit(broker.source, "s3")
        lender.lend_if_due()
        assert [each.result(60) for each in asked] == [after.fields(), after]
    assert cache()["access_key_id"] == "ASIAAFTER"


def test_nobody_waits_twice_for_keys_that_nobody_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        assert timeout is not None
        waits.append(timeout)
        return False

    # A real wait for keys that nobody replaces would take ten seconds.
    monkeypatch.setattr(lent_credentials, "_RENEWED_WITHIN_S", 0.01)
    broker, expired = CredentialBroker(), datetime.now(timezone.utc) - timedelta(hours=1)
    broker.lend(TICKET, "s3", (revoked := Credentials("ASIAREVOKED", "s", "t", expired)).fields())
    assert broker.source("s3") == revoked
    with monkeypatch.context() as second:
        second.setattr(threading.Condition, "wait", wait)
        assert [broker.source("s3") for _ in range(3)] == [revoked] * 3
        assert not waits, "a store asks for each of its requests"

    # Others that have expired may be replaced, too.
    broker.lend(TICKET, "s3", Credentials("ASIAOTHER", "s", "t", expired).fields())
    with ThreadPoolExecutor(1) as threads, monkeypatch.context() as patient:
        # Longer than the real wait, as a busy machine may lend the others late.
        patient.setattr(lent_credentials, "_RENEWED_WITHIN_S", 60.0)
        asked = threads.submit(broker.source, "s3")
        broker.lend(TICKET, "s3", KEYS.fields())
        assert asked.result(60) == KEYS


def test_if_the_source_fails_the_credentials_are_kept_and_it_is_retried_soon(resolver: Resolver) -> None:
    broker = CredentialBroker()
    lender = CredentialLender(partial(broker.lend, TICKET), {"s3": resolver.resolve})
    resolver.error = RuntimeError("no luck")
    resolver.now_s += 61
    lender.lend_if_due()
    assert broker.credentials(TICKET, "s3") == KEYS.fields()
    resolver.error, resolver.credentials = None, None
    resolver.now_s += 6
    lender.lend_if_due()
    assert broker.credentials(TICKET, "s3") is None


@pytest.mark.parametrize(("amazon", "expected"), [(True, "ASIATASK"), (False, "AKIAEXAMPLE1234")])
def test_a_nodes_own_role_is_only_used_for_amazon_s3(
    amazon: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def metadata_service(request: Request) -> Answer:
        keys = {"AccessKeyId": "ASIATASK", "SecretAccessKey": "s", "Token": "t", "Expiration": "2199-01-01T00:00:00Z"}
        return Answer(body=json.dumps(keys).encode())

    with scripted_s3(metadata_service) as (url, _):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/role")
        settings = S3(None if amazon else "http://minio:9000", "us-east-1")
        store = open_store("s3://bucket/prefix", cloud=settings).with_lent_credentials(lambda _: KEYS)
        used = store.credentials()  # pyright: ignore[reportAttributeAccessIssue]
    assert used is not None and used.access_key_id == expected


def test_a_folder_needs_no_lent_credentials(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert store.with_lent_credentials(lambda _: KEYS) is store
