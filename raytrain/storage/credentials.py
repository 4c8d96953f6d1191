"""Credentials of clouds and their sources. Credentials are held in memory, never printed, never pickled."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T", bound="BucketCredentials")

_ASK_EVERY_S = 60.0

CredentialFields = tuple[Any, ...]
"""The fields of credentials in order, as they are sent to another process."""


class BucketCredentials(ABC):
    """Credentials of one cloud. Their text shows no secret.

    They cannot be pickled, so that they do not end up in a file, in a task's arguments or in Ray's object store by
    accident. To send them to another process on purpose, send :meth:`fields`; :func:`restored` is the way back.
    """

    expires_at: datetime | None
    """When they expire, with a time zone; None if they do not, or if that is unknown."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What may be shown of them."""

    @abstractmethod
    def for_obstore(self) -> dict[str, Any]:
        """The same as obstore wants them, with the secrets."""

    def fields(self) -> CredentialFields:
        """Return all fields, the secret ones too."""
        return tuple(vars(self).values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity}, expires_at={self.expires_at})"

    def __reduce__(self) -> Any:
        raise TypeError("Credentials cannot be pickled; send a credential source instead.")


@dataclass(frozen=True, repr=False)
class Credentials(BucketCredentials):
    """One set of AWS credentials. Its text shows the last four characters of the access key ID, and no secret."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None
    expires_at: datetime | None = None

    @property
    def identity(self) -> str:
        """``…`` and the last four characters of the access key ID."""
        return f"…{self.access_key_id[-4:]}"

    def for_obstore(self) -> dict[str, Any]:
        return {
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "token": self.session_token,
            "expires_at": self.expires_at,
        }


@dataclass(frozen=True, repr=False)
class AzureCredentials(BucketCredentials):
    """What Azure Blob Storage accepts: the account's key, a shared access signature, or an access token."""

    kind: Literal["access_key", "sas_token", "token"]
    secret: str
    expires_at: datetime | None = None

    @property
    def identity(self) -> str:
        """What kind of credentials they are."""
        return {"access_key": "account key", "sas_token": "shared access signature", "token": "access token"}[self.kind]

    def for_obstore(self) -> dict[str, Any]:
        return {self.kind: self.secret, "expires_at": self.expires_at}


@dataclass(frozen=True, repr=False)
class GoogleCredentials(BucketCredentials):
    """An access token for Google Cloud Storage."""

    token: str
    expires_at: datetime | None = None

    @property
    def identity(self) -> str:
        """What they are."""
        return "access token"

    def for_obstore(self) -> dict[str, Any]:
        return {"token": self.token, "expires_at": self.expires_at}


def restored(cloud: str, fields: CredentialFields | None) -> BucketCredentials | None:
    """Return the credentials of a cloud, such as ``s3``, of which these are the fields."""
    kinds: dict[str, type[BucketCredentials]] = {"s3": Credentials, "az": AzureCredentials, "gs": GoogleCredentials}
    return kinds[cloud](*fields) if fields else None


class NoCredentials(Exception):
    """A source has no credentials."""


class CredentialSource(Protocol):
    """Returns credentials that are valid now, or None if it has none. Called again shortly before they expire.

    A store's source is pickled with the store, so it must not contain a secret itself.
    """

    def __call__(self) -> BucketCredentials | None: ...


LentCredentials = Callable[[str], "BucketCredentials | None"]
"""Returns the credentials that the driver lends for a cloud, such as ``s3``; likewise pickled with a store."""


def resolve() -> Credentials | None:
    """Return this process's credentials from the standard AWS chain: environment, profile, single sign-on, role.

    Raises botocore's exceptions if the configuration is broken (an unknown profile, for example) or a role is refused;
    :func:`raytrain.storage.error_sentences.explain` turns them into a sentence.
    """
    found = _chain(_aws_environment())
    if not hasattr(found, "refresh_needed"):
        _chain.cache_clear()  # static credentials are read again each time, because their file may have been rewritten
    return _frozen(found)


def required(credentials: T | None) -> T:
    """Return ``credentials``; raises NoCredentials if there are none."""
    if credentials is None:
        raise NoCredentials("none are configured")
    return credentials


def ask_again_after_s(credentials: BucketCredentials | None) -> float:
    """Seconds after which whoever keeps ``credentials`` should ask their source again: a minute, or a third of the
    time until they expire.

    They may have changed before they expire: a credentials file can be rewritten at any time.
    """
    if credentials is None or credentials.expires_at is None:
        return _ASK_EVERY_S
    remaining_s = (credentials.expires_at - datetime.now(timezone.utc)).total_seconds()
    return min(_ASK_EVERY_S, remaining_s / 3)


def own_role() -> Credentials | None:
    """Return the credentials of the role that this node or container has (EC2, ECS, EKS).

    Ignores what a user configured. Returns at once if there can be no role: the metadata service is asked only on EC2,
    and never if AWS_EC2_METADATA_DISABLED is true. Raises botocore's exceptions if a role gives no credentials.
    """
    return _frozen(_role(_aws_environment()))


@dataclass(frozen=True)
class OwnRoleOr:
    """A source that can be pickled: the role of the node where it is called, or ``fallback`` if there is none."""

    fallback: CredentialSource

    def __call__(self) -> BucketCredentials | None:
        return own_role() or self.fallback()


@lru_cache(maxsize=1)
def _chain(environment: frozenset[tuple[str, str]]) -> Any:
    return _session().get_credentials()


@lru_cache(maxsize=1)
def _role(environment: frozenset[tuple[str, str]]) -> Any:
    providers = [provider for provider, may_apply in _ROLE_PROVIDERS.items() if may_apply()]
    if not providers:
        return None
    chain = _session().get_component("credential_provider")
    found: Any = None
    for provider in providers:
        found = found or chain.get_provider(provider).load()
    return found


def _session() -> Any:
    import botocore.session  # pyright: ignore[reportMissingTypeStubs] ; takes 0.4 s, and folders do not need it

    return botocore.session.Session()


def _aws_environment() -> frozenset[tuple[str, str]]:
    """Return the key of the caches: the variables that select credentials. A notebook may change them between runs."""
    return frozenset(item for item in os.environ.items() if item[0].startswith("AWS_"))


def _frozen(found: Any) -> Credentials | None:
    if found is None:
        return None
    keys = found.get_frozen_credentials()  # refreshes them first if they expire soon
    expires_at = getattr(found, "_expiry_time", None)  # botocore has no public attribute for it
    # obstore accepts only the standard library's UTC, and botocore uses another.
    return Credentials(keys.access_key, keys.secret_key, keys.token, expires_at and expires_at.astimezone(timezone.utc))


def _has_web_identity() -> bool:
    return "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ and "AWS_ROLE_ARN" in os.environ


def _has_container_role() -> bool:
    return any(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI" in os.environ for kind in ("RELATIVE", "FULL"))


def _is_ec2() -> bool:
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    return "AWS_EC2_METADATA_SERVICE_ENDPOINT" in os.environ or any(_starts_with(*mark) for mark in _EC2_MARKS)


def _starts_with(path: str, prefix: str) -> bool:
    try:
        return Path(path).read_text().lower().startswith(prefix)
    except OSError:
        return False


_EC2_MARKS = (
    ("/sys/class/dmi/id/sys_vendor", "amazon ec2"),  # Nitro
    ("/sys/hypervisor/uuid", "ec2"),  # Xen
)
"""Files that exist on EC2 instances, and how their content starts."""

_ROLE_PROVIDERS: dict[str, Callable[[], bool]] = {
    "assume-role-with-web-identity": _has_web_identity,
    "container-role": _has_container_role,
    "iam-role": _is_ec2,
}
"""botocore's credential providers for roles, each with whether it may have credentials here."""
