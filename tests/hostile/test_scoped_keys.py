"""``--scope-keys``: what the cluster is lent can read the images and write the run, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError
from moto import mock_aws

from raytrain.errors import UsageError
from raytrain.launch.prepare import prepare, settle_options
from raytrain.launch.ray import coordinator
from raytrain.launch.ray.serve_credentials import lend_credentials
from raytrain.storage import scoped_keys
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.clouds.s3_credentials import resolve_credentials
from raytrain.storage.credentials import Credentials
from raytrain.storage.open import open_store
from raytrain.storage.scoped_keys import Scope, ScopedCredentials
from tests.helpers.small_runs import config

SCOPE = Scope(("s3://images/cats/train/", "/folder/test/"), ("s3://runs/mine/first/",))


def statements(scope: Scope, action: str) -> list[dict[str, Any]]:
    return [each for each in scope.policy("aws")["Statement"] if action in each["Action"]]


def test_the_policy_allows_to_read_the_images_and_to_write_the_run() -> None:
    (write,) = statements(SCOPE, "s3:PutObject")
    assert write["Resource"] == ["arn:aws:s3:::runs/mine/first/*"] and "s3:DeleteObject" in write["Action"]
    read, _ = statements(SCOPE, "s3:GetObject")
    assert (read["Action"], read["Resource"]) == (["s3:GetObject"], ["arn:aws:s3:::images/cats/train/*"])
    listed = {
        each["Resource"][0]: each["Condition"]["StringLikeIfExists"]["s3:prefix"]
        for each in statements(SCOPE, "s3:ListBucket")
    }
    assert listed == {"arn:aws:s3:::images": ["cats/train/*"], "arn:aws:s3:::runs": ["mine/first/*"]}


def test_a_whole_bucket_and_one_bucket_for_all_are_allowed_as_such() -> None:
    scope = Scope(("s3://mine/",), ("s3://mine/runs/first/",))
    (listed,) = statements(scope, "s3:ListBucket")
    assert listed["Condition"]["StringLikeIfExists"]["s3:prefix"] == ["*", "runs/first/*"]
    assert statements(scope, "s3:GetObject")[0]["Resource"] == ["arn:aws:s3:::mine/*"]


def test_a_prefix_with_wildcards_stands_for_itself_alone() -> None:
    (read,) = statements(Scope(("s3://images/a*b?${aws:userid}/",), ()), "s3:GetObject")
    assert read["Resource"] == ["arn:aws:s3:::images/a${*}b${?}${$}{aws:userid}/*"]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mocked AWS account, with this process as a user."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-own")
    mocked = mock_aws(config={"core": {"mock_credentials": False}})
    mocked.start(reset=False)  # other tests of this process have buckets in a server of moto's
    yield
    mocked.stop(remove_data=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The last arguments of each call to AWS."""
    calls: dict[str, dict[str, Any]] = {}
    # moto answers below this method of boto, and nothing public tells what it was asked.
    original: Callable[..., Any] = BaseClient._make_api_call  # pyright: ignore

    def call(self: BaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        calls[operation] = arguments
        return original(self, operation, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    return calls


def test_a_user_lends_keys_of_a_federated_user(account: None, asked: dict[str, dict[str, Any]]) -> None:
    scoped = ScopedCredentials(SCOPE, "us-east-1")()
    assert scoped is not None and scoped.access_key_id != "AKIAOWN" and scoped.token and scoped.expires_at
    assert json.loads(asked["GetFederationToken"]["Policy"]) == SCOPE.policy("aws")
    assert asked["GetFederationToken"]["DurationSeconds"] == 3600


def test_a_role_lends_keys_of_itself(
    account: None, asked: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arn = "arn:aws:iam::123456789012:role/trainer"
    keys = boto3.client("sts", "us-east-1").assume_role(RoleArn=arn, RoleSessionName="me")["Credentials"]
    for name, key in (("ACCESS_KEY_ID", "AccessKeyId"), ("SECRET_ACCESS_KEY", "SecretAccessKey")):
        monkeypatch.setenv(f"AWS_{name}", keys[key])
    monkeypatch.setenv("AWS_SESSION_TOKEN", keys["SessionToken"])
    scoped = ScopedCredentials(SCOPE, "us-east-1")()
    assert scoped is not None and scoped.access_key_id != keys["AccessKeyId"]
    assert asked["AssumeRole"]["RoleArn"] == arn
    assert json.loads(asked["AssumeRole"]["Policy"]) == SCOPE.policy("aws")


def test_scoped_keys_are_asked_for_again_when_half_of_their_time_is_over_or_there_are_other_keys(
    account: None, asked: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ScopedCredentials(SCOPE, "us-east-1")
    asked.clear()
    source()
    assert not asked
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOTHER")
    source()
    assert "GetFederationToken" in asked
    asked.clear()
    now = datetime.now(timezone.utc)
    later = SimpleNamespace(now=lambda zone: now + timedelta(minutes=31))
    monkeypatch.setattr(scoped_keys, "datetime", later)
    source()
    assert "GetFederationToken" in asked


def test_if_sts_refuses_nothing_is_lent_and_a_sentence_says_so(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: BaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": "not allowed"}}, operation)

    # moto refuses no call of an account, and its answers come from below this method of boto.
    monkeypatch.setattr(BaseClient, "_make_api_call", refuse)
    with pytest.raises(UsageError) as refused:
        ScopedCredentials(SCOPE, "us-east-1")
    assert str(refused.value) == (
        "--scope-keys: STS issues no scoped keys for the access key …AOWN (An error occurred (AccessDenied) when "
        "calling the GetCallerIdentity operation: not allowed); allow its user sts:GetFederationToken, or its role "
        "sts:AssumeRole of itself, or leave the option out."
    )


def test_without_keys_there_is_nothing_to_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ScopedCredentials(SCOPE, "us-east-1")() is None


class Server:
    """An actor that serves credentials, as the driver sees it; it remembers what it was lent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lent: list[tuple[Any, ...]] = []
        self.lend = SimpleNamespace(remote=lambda ticket, cloud, fields: self.lent.append(fields))
        monkeypatch.setattr("ray.get", lambda reference: reference)


@pytest.mark.parametrize("scoped", [True, False])
def test_the_cluster_is_lent_the_scoped_keys_and_no_others(
    scoped: bool, account: None, asked: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch)
    store = open_store("s3://runs/mine/first", cloud=S3(None, "us-east-1"))
    lend_credentials(server, [store], SCOPE if scoped else None)
    lent = [Credentials(*fields) for fields in server.lent]
    own = resolve_credentials()
    assert own is not None and len(lent) == 1
    assert ("canary-own" in lent[0].fields(), "GetFederationToken" in asked) == (not scoped, scoped)


def test_sts_is_asked_once_for_all_stores(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    # moto answers below this method of boto, and nothing public tells what it was asked.
    original: Callable[..., Any] = BaseClient._make_api_call  # pyright: ignore

    def call(self: BaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        asked.append(f"{operation} {self.meta.region_name}")
        return original(self, operation, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    stores = [
        open_store(url, cloud=S3(None, region))
        for url, region in (("s3://images/cats", "eu-west-1"), ("s3://runs/mine/first", "us-east-2"))
    ]
    lend_credentials(Server(monkeypatch), stores, SCOPE)
    assert [each for each in asked if "Token" in each] == ["GetFederationToken eu-west-1"]


def test_the_scope_of_a_run_is_its_images_and_itself(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[Scope | None] = []
    monkeypatch.setattr(coordinator, "start_coordinator", lambda *_, **__: None)
    monkeypatch.setattr(
        coordinator, "lend_credentials", lambda server, stores, scope: lent.append(scope) or (None, None)
    )
    for options in ({"scope_keys": True}, {"name": "other"}):
        with prepare(settle_options(config(images, tmp_path, **options))) as prepared, ExitStack() as opened:
            coordinator.open_coordinator(prepared, opened)
            opened.pop_all()  # nothing has started that could be stopped
    assert lent == [Scope((f"{images}/",), (f"{tmp_path}/run/",)), None]
