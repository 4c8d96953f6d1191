"""Credentials that are good for one run only: AWS STS issues them, with a session policy that names its prefixes."""

# botocore has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from raytrain.errors import UsageError
from raytrain.storage.credentials import Credentials, resolve

_LIFE_S = 3600  # STS issues nothing longer to who has a role
_SESSION = "raytrain"
_READ = ["s3:GetObject"]
_WRITE = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
_DECRYPT = ["kms:Decrypt", "kms:GenerateDataKey"]


@dataclass(frozen=True)
class Scope:
    """What credentials are good for: ``reads`` and ``writes`` are what URLs start with, such as s3://bucket/prefix/.

    Folders among them are left out.
    """

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
    """A credential source: what :func:`resolve` returns, limited to a scope by STS, and renewed in time.

    ``region`` is that of the STS to ask. Raises UsageError, also when it is made, if STS refuses.
    """

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
        if self._scoped is None or own != self._own or _is_half_over(self._scoped):
            self._scoped = _scoped(own, self._scope, self._region)
            self._own = own
        return self._scoped


def _scoped(own: Credentials, scope: Scope, region: str) -> Credentials:
    import botocore.session  # pyright: ignore[reportMissingTypeStubs]
    from botocore.exceptions import BotoCoreError, ClientError  # pyright: ignore[reportMissingTypeStubs]

    keys = dict(zip(("aws_access_key_id", "aws_secret_access_key", "aws_session_token"), own.fields()[:3], strict=True))
    try:
        issued = _issued(botocore.session.Session().create_client("sts", region, **keys), scope)
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


def _is_half_over(scoped: Credentials) -> bool:
    assert scoped.expires_at is not None
    return (scoped.expires_at - datetime.now(timezone.utc)).total_seconds() < _LIFE_S / 2


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
