"""Keys of AWS STS that reach one run alone (``--scope-keys``): its images to read, and its folder to write."""

# boto3 and botocore have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from raytrain.errors import UsageError
from raytrain.storage.clouds.s3_credentials import resolve_credentials
from raytrain.storage.credentials import Credentials
from raytrain.storage.store import Store

_LIFE_S = 3600  # STS issues nothing longer to who has a role
_SESSION = "raytrain"
_READ = ["s3:GetObject"]
_WRITE = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
_DECRYPT = ["kms:Decrypt", "kms:GenerateDataKey"]


@dataclass(frozen=True)
class Scope:
    """The URLs in S3 that credentials are limited to: all that start with one of ``reads`` or ``writes``.

    What may be written may be read, too. URLs that are not in S3 are left out.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @classmethod
    def of(cls, read: Iterable[Store], written: Iterable[Store] = ()) -> Scope:
        """Return the scope of a process that reads some stores, and writes others.

        Example: ``Scope.of([open_store("s3://photos/train")]) == Scope(reads=("s3://photos/train/",), writes=())``
        """
        reads, writes = (tuple(dict.fromkeys(f"{store.url}/" for store in stores)) for stores in (read, written))
        return cls(reads, writes)

    def policy(self, partition: str) -> dict[str, Any]:
        """Return the session policy. ``partition`` is a part of AWS: aws, aws-cn or aws-us-gov."""
        # Objects, to read or also to write.
        allowed = [(_READ, _buckets_and_roots(self.reads)), (_WRITE, _buckets_and_roots(self.writes))]
        objects = [
            _allow(actions, [_arn(partition, bucket, root) for bucket, root in roots])
            for actions, roots in allowed
            if roots
        ]

        # Listings of the same prefixes, a statement for each bucket. Without s3:ListBucket, S3 answers that access is
        # denied if an object does not exist. Requests for objects have no prefix, so the condition must not ask for
        # one.
        listed = sorted({root for _, roots in allowed for root in roots})
        listings: list[dict[str, Any]] = []
        for bucket in sorted({bucket for bucket, _ in listed}):
            prefixes = [f"{_literal(root)}*" for bucket_of_root, root in listed if bucket_of_root == bucket]
            condition = {"StringLikeIfExists": {"s3:prefix": prefixes}}
            listings.append(_allow(["s3:ListBucket"], [_arn(partition, bucket)], condition))
        encrypted = _allow(_DECRYPT, ["*"], {"StringLike": {"kms:ViaService": "s3.*"}})
        return {"Version": "2012-10-17", "Statement": [*objects, *listings, encrypted]}


class ScopedCredentials:
    """A source of AWS credentials that STS has limited to a scope; asks STS for new ones when they are half over.

    The constructor asks for the first ones. It and each call raise UsageError if STS refuses.
    """

    def __init__(self, scope: Scope, region: str) -> None:
        self._scope = scope
        self._region = region
        self._unscoped: Credentials | None = None  # this process's own, of which ``_scoped`` were made
        self._scoped: Credentials | None = None
        self()  # so that a refusal comes at once

    def __call__(self) -> Credentials | None:
        """Return the credentials; None if this process has none that could be limited."""
        unscoped = resolve_credentials()
        if unscoped is None:
            return None
        # Renew them when half of their time is over, or when this process has other credentials than before.
        expires_at = self._scoped and self._scoped.expires_at
        half_is_over = expires_at is None or expires_at <= datetime.now(timezone.utc) + timedelta(seconds=_LIFE_S / 2)
        if half_is_over or unscoped != self._unscoped:
            self._scoped = _request_scoped_keys(unscoped, self._scope, self._region)
            self._unscoped = unscoped
        return self._scoped


def _request_scoped_keys(unscoped: Credentials, scope: Scope, region: str) -> Credentials:
    """Return keys of the same user or role from STS, further limited by the scope's policy, for an hour."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        # The ARN of the caller says its account, and whether it is a user or a role.
        sts = boto3.Session().client("sts", region, **unscoped.for_boto3())
        arn: str = sts.get_caller_identity()["Arn"]
        _, partition, _, _, account, identity = arn.split(":", 5)
        policy = json.dumps(scope.policy(partition), separators=(",", ":"))  # it may have 2,048 characters

        # A role must assume itself, because only a user may ask for a federation token.
        if role := re.match(r"assumed-role/([^/]+)/", identity):
            role_arn = f"arn:{partition}:iam::{account}:role/{role[1]}"
            answer = sts.assume_role(RoleArn=role_arn, RoleSessionName=_SESSION, Policy=policy, DurationSeconds=_LIFE_S)
        else:
            answer = sts.get_federation_token(Name=_SESSION, Policy=policy, DurationSeconds=_LIFE_S)
    except (BotoCoreError, ClientError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(
            f"--scope-keys: STS issues no scoped keys for the access key {unscoped.identity} ({reason}); allow its "
            "user sts:GetFederationToken, or its role sts:AssumeRole of itself, or leave the option out."
        ) from None
    issued = answer["Credentials"]
    expires_at = issued["Expiration"].astimezone(timezone.utc)
    return Credentials(issued["AccessKeyId"], issued["SecretAccessKey"], issued["SessionToken"], expires_at)


def _buckets_and_roots(urls: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return, for each of the URLs that is in S3, its bucket and the text that its objects' names start with."""
    split = (url.removeprefix("s3://").partition("/") for url in urls if url.startswith("s3://"))
    return [(bucket, root) for bucket, _, root in split]


def _allow(actions: list[str], resources: list[str], condition: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the statement of a policy that allows ``actions`` on ``resources``."""
    statement = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def _arn(partition: str, bucket: str, root: str | None = None) -> str:
    """Return the ARN of a bucket, or with ``root`` that of its objects whose names start with ``root``."""
    return f"arn:{partition}:s3:::{bucket}" + ("" if root is None else f"/{_literal(root)}*")


def _literal(text: str) -> str:
    """Return ``text`` with ``*``, ``?`` and ``$`` escaped, which have a meaning in policies."""
    return re.sub(r"[*?$]", lambda match: f"${{{match[0]}}}", text)
