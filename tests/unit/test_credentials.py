from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest

from raytrain.datasets.sources import Labelling, labelled_source
from raytrain.errors import StorageError
from raytrain.storage.clouds import s3_credentials
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.clouds.s3_credentials import own_role, own_role_or, resolve_credentials
from raytrain.storage.credentials import Credentials, CredentialSource
from raytrain.storage.open import open_store
from tests.helpers.scripted_s3 import Answer, Request, scripted_s3

KEYS = Credentials("AKIAEXAMPLE1234", "canary-secret", "canary-token")
LATER = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(hours=6)


@dataclass(frozen=True)
class Lent:
    """A fake of the driver's credentials."""

    def __call__(self) -> Credentials | None:
        return KEYS


def role_keys(name: str, expires_at: datetime = LATER) -> bytes:
    """Return the response of a metadata service."""
    keys = {"AccessKeyId": name, "SecretAccessKey": "s", "Token": "t", "Expiration": f"{expires_at:%Y-%m-%dT%H:%M:%SZ}"}
    return json.dumps({"Code": "Success", **keys}).encode()


def ec2(request: Request) -> Answer:
    """Answer as EC2's metadata service on an instance with a role."""
    if request.path.endswith("/api/token"):
        return Answer(body=b"token")
    return Answer(body=role_keys("ASIAEC2") if request.path.endswith("/worker") else b"worker")


# Secrecy.


@pytest.mark.parametrize(
    "show", [repr, str, "{}".format, lambda keys: repr([keys]), lambda keys: f"{partial(own_role_or, lambda: keys)}"]
)
def test_no_text_of_credentials_contains_a_secret(show: Callable[[Credentials], str]) -> None:
    text = show(KEYS)
    assert "canary" not in text and "AKIA" not in text


def test_the_identity_is_the_end_of_the_access_key_id() -> None:
    assert KEYS.identity == "…1234" and "…1234" in repr(KEYS)


@pytest.mark.parametrize(
    "holder",
    [lambda: KEYS, lambda: {"keys": [KEYS]}, lambda: partial(own_role_or, KEYS)],  # pyright: ignore
)
def test_credentials_cannot_be_pickled_except_as_plain_fields(holder: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(holder())
    assert Credentials(*pickle.loads(pickle.dumps(KEYS.fields()))) == KEYS


# The standard chain.


def test_credentials_of_the_environment_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_credentials() is None
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_SESSION_TOKEN", "token"),
    ):
        monkeypatch.setenv(name, value)
    assert resolve_credentials() == Credentials("id", "secret", "token", None)


@pytest.mark.parametrize("folder", ["~no-such-user", "x" * 300])
def test_a_configuration_that_cannot_be_looked_at_counts_as_none(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A container may have HOME=/root and another user. Root may look everywhere, so a name is too long here.
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{folder}/.aws/config")
    assert resolve_credentials() is None
    assert S3.configured("s3://bucket") == S3()


def test_a_rewritten_profile_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    for name in ("first", "second"):
        file.write_text(f"[lab]\naws_access_key_id = {name}\naws_secret_access_key = s\n")
        keys = resolve_credentials()
        assert keys is not None and keys.access_key_id == name


@pytest.mark.not_quick
def test_refreshable_credentials_are_cached_until_the_profile_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    log = tmp_path / "log"
    for name in ("a", "b"):
        (tmp_path / name).write_text(json.dumps({"Version": 1, **json.loads(role_keys(name)), "SessionToken": "t"}))
    profiles = (
        f"[profile {name}]\ncredential_process = sh -c 'echo x >> {log}; cat {tmp_path}/{name}'\n"
        for name in ("a", "b")
    )
    config.write_text("".join(profiles))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("a", "b"):
        monkeypatch.setenv("AWS_PROFILE", name)
        assert {resolve_credentials() for _ in range(5)} == {Credentials(name, "s", "t", LATER)}
    assert log.read_text().count("x") == 2


# Programs and files that a configuration names, and that do not work.

PROGRAMS = {
    "text": "echo Logged in as alice",
    "list": "echo '[1]'",
    "empty": "true",
    "binary": r"printf '\377\376'",
    "no-date": """echo '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": "soon"}'""",
    "fails": "echo >&2; echo token expired >&2; exit 3",
}
SIGN_IN = """[default]
sso_start_url = https://x.awsapps.com/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = r
"""
SESSION = """[default]
sso_session = work
sso_account_id = 123456789012
sso_role_name = r
[sso-session work]
sso_region = us-east-1
sso_start_url = https://x.awsapps.com/start
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with the configuration ``config``, no other credentials, and executable programs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # of the bucket and of STS; nobody answers there
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "no-program").write_text("not executable")
    return tmp_path


def refused(home: Path, config: str) -> str:
    """Return what a bucket's user is told with this configuration."""
    (home / "config").write_text(config)
    with pytest.raises(StorageError) as raised:
        open_store("s3://bucket/data").check_readable()
    with pytest.raises(StorageError) as again:
        list(open_store("s3://bucket/data").list())
    with pytest.raises(StorageError) as packing, labelled_source("s3://bucket/a.tar", Labelling()):
        pass
    assert str(raised.value) == str(again.value) == str(packing.value)
    return str(raised.value)


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("missing", "No such file or directory"),
        ("no-program", "Permission denied"),
        *((name, "it does not print keys as JSON") for name in ("text", "list", "empty", "binary", "no-date")),
        ("fails", "token expired"),
    ],
)
@pytest.mark.parametrize("config", ["[default]\n", "[default]\nrole_arn = r\nsource_profile = keys\n[profile keys]\n"])
def test_a_program_that_gives_no_keys_is_named_without_its_arguments(
    program: str, problem: str, config: str, home: Path
) -> None:
    assert refused(home, f"{config}credential_process = {home}/{program} --token canary-secret\n") == (
        "The credentials of this machine's AWS configuration could not be obtained "
        f"(credential_process {home}/{program}: {problem}); check its role or profile."
    )


@pytest.mark.parametrize("in_profile", [False, True])
@pytest.mark.parametrize(
    ("file", "problem"),
    [("none", "No such file or directory"), ("", "Is a directory"), ("empty-token", "it contains no token")],
)
def test_a_web_identity_whose_file_cannot_be_read_is_named(
    file: str, problem: str, in_profile: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "empty-token").write_text("")
    config, setting = f"web_identity_token_file = {home}/{file}\nrole_arn = arn:aws:iam::1:role/x\n", None
    if not in_profile:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", f"{home}/{file}")
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
        config, setting = "", "AWS_WEB_IDENTITY_TOKEN_FILE"
    assert refused(home, f"[default]\nregion = us-east-1\n{config}") == (
        "The credentials of this machine's AWS configuration could not be obtained "
        f"({setting or 'web_identity_token_file'} {home}/{file}: {problem}); check its role or profile."
    )


@pytest.mark.parametrize("content", ["{broken", "", "[]", "{}", '{"accessToken": "a", "expiresAt": "soon"}'])
@pytest.mark.parametrize(("config", "key"), [(SIGN_IN, "https://x.awsapps.com/start"), (SESSION, "work")])
def test_a_stored_sign_in_that_is_damaged_says_to_sign_in(
    content: str, config: str, key: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = home / ".aws/sso/cache"
    cache.mkdir(parents=True)
    (cache / f"{hashlib.sha1(key.encode()).hexdigest()}.json").write_text(content)
    # botocore looked for the folder when it was imported.
    monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", str(cache))
    monkeypatch.setattr("botocore.tokens.SSOTokenProvider._SSO_TOKEN_CACHE_DIR", str(cache))
    assert refused(home, config).endswith("sign in again (for example: aws sso login) and repeat the command.")


def test_a_role_that_sts_refuses_is_not_taken_for_the_bucket(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "token").write_text("a token")
    config = (
        f"[default]\nregion = us-east-1\nrole_arn = arn:aws:iam::1:role/x\nweb_identity_token_file = {home}/token\n"
    )
    body = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>Not that role.</Message></Error></ErrorResponse>"
    with scripted_s3(lambda request: Answer(403, body)) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        said = refused(home, config)
    assert "AssumeRoleWithWebIdentity" in said and "could not be obtained" in said and "s3:ListBucket" not in said


# The node's own role.


def test_a_machine_outside_aws_has_no_role_and_sends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[object] = []
    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", lambda self, request: requests.append(request))
    # Its marks are files of the kernel, which a test cannot write; this machine may be one of AWS.
    marks = (("/dev/null", "amazon ec2"), ("/no/such/file", "ec2"))
    monkeypatch.setattr(s3_credentials, "_EC2_MARKS", marks)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a person's, not the node's")
    assert own_role() is None and not requests


def test_an_ec2_instance_is_recognized_by_its_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    requests: list[object] = []
    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", lambda self, request: requests.append(request))
    # Its marks are files of the kernel, which a test cannot write.
    monkeypatch.setattr(s3_credentials, "_EC2_MARKS", ((str(tmp_path / "sys_vendor"), "amazon ec2"),))
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with contextlib.suppress(Exception):
        own_role()
    assert requests


def test_an_ec2_instance_has_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    with scripted_s3(ec2) as (url, requests):
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        assert own_role() == Credentials("ASIAEC2", "s", "t", LATER)
        num_requests = len(requests)
        assert own_role() == resolve_credentials() == Credentials("ASIAEC2", "s", "t", LATER)
        assert len(requests) == num_requests
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a person's")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        assert own_role() is None


def test_ec2_metadata_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_s3(ec2) as (url, requests):
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "True")
        assert own_role() is None
    assert not requests


def test_a_container_has_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_s3(lambda request: Answer(body=role_keys("ASIATASK"))) as (url, _):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/role")
        assert own_role() == Credentials("ASIATASK", "s", "t", LATER)


def test_a_pod_has_the_role_of_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "AccessKeyId": "ASIAPOD",
        "SecretAccessKey": "s",
        "SessionToken": "t",
        "Expiration": f"{LATER:%Y-%m-%dT%H:%M:%SZ}",
    }
    text = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
    for name in ("Credentials", "AssumeRoleWithWebIdentityResult", "AssumeRoleWithWebIdentityResponse"):
        text = f"<{name}>{text}</{name}>"
    (tmp_path / "token").write_text("a-web-token")
    with scripted_s3(lambda request: Answer(body=text.encode())) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/pod")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        assert own_role() == Credentials("ASIAPOD", "s", "t", LATER)


def test_a_node_uses_its_own_role_or_else_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    source: CredentialSource = pickle.loads(pickle.dumps(partial(own_role_or, Lent())))
    assert source() == KEYS
    with scripted_s3(lambda request: Answer(body=role_keys("ASIATASK"))) as (url, _):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/role")
        keys = source()
    assert isinstance(keys, Credentials) and keys.access_key_id == "ASIATASK"
