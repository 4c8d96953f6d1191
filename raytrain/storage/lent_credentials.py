"""Credentials for processes that have none of their own: the driver's, or keys for one run's prefixes from AWS STS.

The driver sends its credentials with a :class:`CredentialLender` to a :class:`CredentialBroker` in another process.
How they travel is up to the caller; they must stay in memory. Whoever asks for them shows a ticket, which the driver
gives to its own processes only: others may be able to call the same broker.
"""

# boto3 and botocore have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import hmac
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from raytrain.errors import UsageError
from raytrain.storage.clouds.s3 import resolve
from raytrain.storage.credentials import (
    BucketCredentials,
    CredentialFields,
    Credentials,
    CredentialSource,
    ask_again_after_s,
    restored,
)

_MIN_WAIT_S = 1.0
_RETRY_AFTER_S = 5.0
_LIFE_S = 3600  # STS issues nothing longer to who has a role
_SESSION = "raytrain"
_READ = ["s3:GetObject"]
_WRITE = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
_DECRYPT = ["kms:Decrypt", "kms:GenerateDataKey"]


class CredentialBroker:
    """Holds the credentials that the driver lent last for each cloud, in the memory of this process."""

    def __init__(self) -> None:
        self._lent: dict[str, BucketCredentials | None] = {}
        self._ticket: str | None = None

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        """Replace the lent credentials of a cloud. The first ticket counts; raises PermissionError for another one."""
        self._ticket = self._ticket or ticket
        self._check(ticket)
        self._lent[cloud] = restored(cloud, fields)

    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        """The fields of a cloud's credentials for another process. Raises PermissionError for another ticket."""
        self._check(ticket)
        lent = self._lent.get(cloud)
        return lent.fields() if lent else None

    def source(self, cloud: str) -> BucketCredentials | None:
        """Return the lent credentials of a cloud: ``LentCredentials`` for stores in this process."""
        return self._lent.get(cloud)

    def _check(self, ticket: str) -> None:
        if self._ticket is None or not hmac.compare_digest(ticket.encode(), self._ticket.encode()):
            raise PermissionError("Credentials are lent to the processes of the run only.")


class CredentialLender:
    """Lends the credentials of each cloud's source with ``lend``: when it is made, and again before they expire."""

    def __init__(
        self, lend: Callable[[str, CredentialFields | None], None], sources: Mapping[str, CredentialSource]
    ) -> None:
        self._send = lend
        self._sources = sources
        self._next_at_s = dict.fromkeys(sources, 0.0)
        self.lend_if_due()

    def lend_if_due(self) -> None:
        """Lend again if :func:`raytrain.storage.credentials.ask_again_after_s` says so."""
        for cloud, next_at_s in self._next_at_s.items():
            if time.monotonic() >= next_at_s:
                self._next_at_s[cloud] = time.monotonic() + self._lend(cloud)

    def _lend(self, cloud: str) -> float:
        """Lend the credentials of a cloud; the seconds after which this is due again."""
        try:
            resolved = self._sources[cloud]()
        except Exception:
            # The credentials lent before may last until the source works again. If not, their users report the error.
            return _RETRY_AFTER_S
        self._send(cloud, resolved.fields() if resolved else None)
        return max(_MIN_WAIT_S, ask_again_after_s(resolved))


# Keys of AWS STS, for one run alone.


@dataclass(frozen=True)
class Scope:
    """What credentials are good for: URLs that start with one of ``reads`` or ``writes``. Folders are left out."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def policy(self, partition: str) -> dict[str, Any]:
        """The session policy. ``partition`` is what AWS calls this part of itself: aws, aws-cn or aws-us-gov."""
        allowed = [(_READ, _in_s3(self.reads)), (_WRITE, _in_s3(self.writes))]
        objects = [_allow(actions, [_arn(partition, *each) for each in roots]) for actions, roots in allowed if roots]
        listed = sorted({each for _, roots in allowed for each in roots})
        # Without s3:ListBucket, S3 answers that access is denied where an object does not exist. Requests for objects
        # have no prefix, so the condition must not ask for one.
        listings = [
            _allow(
                ["s3:ListBucket"],
                [_arn(partition, bucket)],
                {"StringLikeIfExists": {"s3:prefix": [f"{_literal(root)}*" for of, root in listed if of == bucket]}},
            )
            for bucket in sorted({bucket for bucket, _ in listed})
        ]
        encrypted = _allow(_DECRYPT, ["*"], {"StringLike": {"kms:ViaService": "s3.*"}})
        return {"Version": "2012-10-17", "Statement": [*objects, *listings, encrypted]}


class ScopedCredentials:
    """A credential source: those of :func:`resolve`, limited by STS, and renewed; UsageError if STS refuses."""

    def __init__(self, scope: Scope, region: str) -> None:
        self._scope = scope
        self._region = region
        self._own: Credentials | None = None
        self._scoped: Credentials | None = None
        self()

    def __call__(self) -> Credentials | None:
        """The credentials; None if this process has none that could be limited."""
        own = resolve()
        if own is None:
            return None
        half_over = datetime.now(timezone.utc) + timedelta(seconds=_LIFE_S / 2)
        if self._scoped is None or own != self._own or (self._scoped.expires_at or half_over) <= half_over:
            self._scoped = _scoped(own, self._scope, self._region)
            self._own = own
        return self._scoped


def _scoped(own: Credentials, scope: Scope, region: str) -> Credentials:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        issued = _issued(boto3.Session().client("sts", region, **own.for_boto3()), scope)
    except (BotoCoreError, ClientError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(
            f"--scope-keys: STS issues no scoped keys for the access key {own.identity} ({reason}); allow its user "
            "sts:GetFederationToken, or its role sts:AssumeRole of itself, or leave the option out."
        ) from None
    expires_at = issued["Expiration"].astimezone(timezone.utc)
    return Credentials(issued["AccessKeyId"], issued["SecretAccessKey"], issued["SessionToken"], expires_at)


def _issued(sts: Any, scope: Scope) -> dict[str, Any]:
    """Ask STS for keys of the same user, or of the same role, with the scope's policy as a further limit."""
    arn: str = sts.get_caller_identity()["Arn"]
    _, partition, _, _, account, identity = arn.split(":", 5)
    policy = json.dumps(scope.policy(partition), separators=(",", ":"))  # it may have 2,048 characters
    if role := re.match(r"assumed-role/([^/]+)/", identity):
        role_arn = f"arn:{partition}:iam::{account}:role/{role[1]}"
        answer = sts.assume_role(RoleArn=role_arn, RoleSessionName=_SESSION, Policy=policy, DurationSeconds=_LIFE_S)
    else:
        answer = sts.get_federation_token(Name=_SESSION, Policy=policy, DurationSeconds=_LIFE_S)
    return answer["Credentials"]


def _in_s3(urls: tuple[str, ...]) -> list[tuple[str, str]]:
    """Bucket, and what names start with, of each URL in S3."""
    split = (url.removeprefix("s3://").partition("/") for url in urls if url.startswith("s3://"))
    return [(bucket, root) for bucket, _, root in split]


def _allow(actions: list[str], resources: list[str], condition: dict[str, Any] | None = None) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def _arn(partition: str, bucket: str, root: str | None = None) -> str:
    """The ARN of a bucket, or of the objects whose names start with ``root``."""
    return f"arn:{partition}:s3:::{bucket}" + ("" if root is None else f"/{_literal(root)}*")


def _literal(text: str) -> str:
    """Text without the meaning that *, ? and $ have in a policy."""
    return re.sub(r"[*?$]", lambda found: f"${{{found[0]}}}", text)
