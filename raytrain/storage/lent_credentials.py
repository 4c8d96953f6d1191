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
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from raytrain.errors import UsageError
from raytrain.storage.clouds.s3_credentials import resolve_credentials
from raytrain.storage.credentials import (
    BucketCredentials,
    CredentialFields,
    Credentials,
    CredentialSource,
    ask_again_after_s,
    credentials_of_fields,
)

_MIN_WAIT_S = 1.0
_RETRY_AFTER_S = 5.0
_RENEWED_WITHIN_S = 10.0  # after the driver's machine has slept: it polls twice a second, and its source takes a while
_LIFE_S = 3600  # STS issues nothing longer to who has a role
_SESSION = "raytrain"
_READ = ["s3:GetObject"]
_WRITE = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
_DECRYPT = ["kms:Decrypt", "kms:GenerateDataKey"]


class CredentialBroker:
    """Holds the credentials that the driver has lent for each cloud, in the memory of this process.

    A caller that asks for expired credentials waits up to 10 s for new ones: after the machine has slept, the driver
    lends again. If it does not, the credentials were revoked or their source has failed, and from then on nobody waits
    for them. Otherwise each request of a store would wait, and a run that must end would take hours to do so.
    """

    def __init__(self) -> None:
        self._lent: dict[str, BucketCredentials | None] = {}
        self._given_up: dict[str, BucketCredentials | None] = {}  # expired ones that were not replaced within 10 s
        self._changed = threading.Condition()
        self._ticket: str | None = None

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        """Replace the credentials of a cloud by those with these ``fields``, or by none.

        The first call decides on the ticket. Raises PermissionError if a later one has another ticket.
        """
        self._ticket = self._ticket or ticket
        self._check(ticket)
        with self._changed:
            self._lent[cloud] = credentials_of_fields(cloud, fields)
            self._changed.notify_all()

    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        """Return the fields of a cloud's credentials, for another process; None if none are lent.

        If they have expired, wait as :meth:`source` does. Raises PermissionError if the ticket is wrong.
        """
        self._check(ticket)
        lent = self.source(cloud)
        return lent.fields() if lent else None

    def source(self, cloud: str) -> BucketCredentials | None:
        """Return the lent credentials of a cloud, for stores in this process; None if none are lent.

        If they have expired, wait up to 10 s for the lender to renew them, and return the expired ones if it does not.
        """

        def needs_no_wait() -> bool:
            lent = self._lent.get(cloud)
            return lent is None or not lent.have_expired or lent is self._given_up.get(cloud)

        with self._changed:
            if not self._changed.wait_for(needs_no_wait, _RENEWED_WITHIN_S):
                self._given_up[cloud] = self._lent.get(cloud)
                self._changed.notify_all()  # the threads that wait for the same credentials need not wait either
            return self._lent.get(cloud)

    def _check(self, ticket: str) -> None:
        """Raise PermissionError unless ``ticket`` is that of the first loan."""
        if self._ticket is None or not hmac.compare_digest(ticket.encode(), self._ticket.encode()):
            raise PermissionError("Credentials are lent to the processes of the run only.")


class CredentialLender:
    """Lends the credentials of each cloud's source to other processes, at once, and again before they expire.

    ``lend`` is called with the name of a cloud and its credentials, or None if the source has none: by the constructor,
    and by :meth:`lend_if_due`, which whoever makes a lender has to call every few seconds.
    """

    def __init__(
        self, lend: Callable[[str, CredentialFields | None], None], sources: Mapping[str, CredentialSource]
    ) -> None:
        self._lend = lend
        self._sources = sources
        self._next_at_s = dict.fromkeys(sources, 0.0)
        self._lent: dict[str, BucketCredentials | None] = {}
        self.lend_if_due()

    def lend_if_due(self) -> None:
        """Lend anew the credentials whose source is due by :func:`raytrain.storage.credentials.ask_again_after_s`.

        Those that have expired are always due. A source that fails is asked again after five seconds.
        """
        for cloud, next_at_s in self._next_at_s.items():
            # Credentials may expire before they are due if the machine has slept: its monotonic clock stood still.
            lent = self._lent.get(cloud)
            if time.monotonic() < next_at_s and not (lent and lent.have_expired):
                continue
            try:
                credentials = self._lent[cloud] = self._sources[cloud]()
            except Exception:
                # The credentials lent before may last until the source works again. If not, requests fail with a
                # sentence.
                self._next_at_s[cloud] = time.monotonic() + _RETRY_AFTER_S
                self._lent[cloud] = None
                continue
            self._lend(cloud, credentials.fields() if credentials else None)
            self._next_at_s[cloud] = time.monotonic() + max(_MIN_WAIT_S, ask_again_after_s(credentials))


# Keys of AWS STS, for one run alone.


@dataclass(frozen=True)
class Scope:
    """The URLs in S3 that credentials are limited to: all that start with one of ``reads`` or ``writes``.

    What may be written may be read, too. URLs that are not in S3 are left out.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]

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
    """Return keys of the same user or role from STS, further limited by the scope's policy, for an hour.

    Raises UsageError if STS refuses, or cannot be reached.
    """
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
