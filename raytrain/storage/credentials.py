"""Credentials of clouds and their sources. Credentials are held in memory, never printed, never pickled."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal, TypeVar

T = TypeVar("T", bound="BucketCredentials")

_ASK_EVERY_S = 60.0

CredentialFields = tuple[Any, ...]  # the fields of credentials, in which they are sent to another process


class BucketCredentials(ABC):
    """Credentials of one cloud. Their text shows no secret.

    They cannot be pickled, so that they do not end up in a file, in a task's arguments or in Ray's object store by
    accident. To send them to another process on purpose, send :meth:`fields`, and make them anew there with
    :func:`credentials_of_fields`.
    """

    expires_at: datetime | None  # when they expire, with a time zone; None if they do not, or if that is unknown

    @property
    @abstractmethod
    def identity(self) -> str:
        """Return a text that names the credentials and contains no secret."""

    @property
    def have_expired(self) -> bool:
        """True if they have expired, by the wall clock, which runs on while the machine sleeps."""
        return self.expires_at is not None and self.expires_at <= datetime.now(timezone.utc)

    def for_obstore(self) -> dict[str, Any]:
        """Return the credentials, with their secrets, as the options of a client of obstore."""
        return dict(vars(self))

    def fields(self) -> CredentialFields:
        """Return all fields, the secret ones too."""
        return tuple(vars(self).values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity}, expires_at={self.expires_at})"

    def __reduce__(self) -> Any:
        raise TypeError("Credentials cannot be pickled; send a credential source instead.")


@dataclass(frozen=True, repr=False)
class Credentials(BucketCredentials):
    """One set of AWS credentials."""

    access_key_id: str
    secret_access_key: str
    token: str | None = None
    expires_at: datetime | None = None

    @property
    def identity(self) -> str:
        return f"…{self.access_key_id[-4:]}"

    def for_boto3(self) -> dict[str, Any]:
        """Return the credentials, with their secrets, as the arguments of a client of boto3."""
        return {
            "aws_access_key_id": self.access_key_id,
            "aws_secret_access_key": self.secret_access_key,
            "aws_session_token": self.token,
        }


@dataclass(frozen=True, repr=False)
class AzureCredentials(BucketCredentials):
    """Credentials of Azure Blob Storage: the account's key, a shared access signature, or an access token."""

    kind: Literal["access_key", "sas_token", "token"]
    secret: str
    expires_at: datetime | None = None

    @property
    def identity(self) -> str:
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
        return "access token"


def credentials_of_fields(cloud: str, fields: CredentialFields | None) -> BucketCredentials | None:
    """Return credentials of a cloud, such as ``s3``, made from the result of :meth:`BucketCredentials.fields`.

    Return None if there are no fields.
    """
    kinds: dict[str, type[BucketCredentials]] = {"s3": Credentials, "az": AzureCredentials, "gs": GoogleCredentials}
    return kinds[cloud](*fields) if fields else None


class NoCredentials(Exception):
    """A source has no credentials."""


CredentialSource = Callable[[], "BucketCredentials | None"]
"""Returns credentials that are valid now, or None. It is pickled with its store, so it must not contain a secret."""

LentCredentials = Callable[[str], "BucketCredentials | None"]
"""Returns the credentials that the driver lends for a cloud, such as ``s3``. It is pickled with a store, too."""


def require_credentials(credentials: T | None) -> T:
    """Return ``credentials``; raise NoCredentials if there are none."""
    if credentials is None:
        raise NoCredentials("none are configured")
    return credentials


def ask_again_after_s(credentials: BucketCredentials | None) -> float:
    """Return the seconds until a source is asked again: 60, or a third of the time until expiry if that is less.

    Even credentials that never expire may be replaced in the file that they are read from. The result is negative for
    credentials that have expired.
    """
    if credentials is None or credentials.expires_at is None:
        return _ASK_EVERY_S
    remaining_s = (credentials.expires_at - datetime.now(timezone.utc)).total_seconds()
    return min(_ASK_EVERY_S, remaining_s / 3)


class CredentialCache:
    """Caches a source's credentials for a client: obstore asks ten times a second shortly before they expire.

    ``identity`` is that of earlier credentials of the client, which messages name until there are new ones.
    """

    def __init__(self, source: CredentialSource, identity: str | None = None) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._cached: BucketCredentials | None = None
        self._ask_again_at_s = 0.0
        self.identity = identity
        """The identity of the last credentials, for messages."""
        self.failure: Exception | None = None
        """The exception of the source if its last call failed; obstore would pass on only the text."""

    def __call__(self) -> Any:
        """Return the credentials as obstore wants them; raise the source's exception, or NoCredentials."""
        with self._lock:
            if self._cached is None or self._cached.have_expired or time.monotonic() >= self._ask_again_at_s:
                # A failure leaves the old time, so that the source is asked again at once.
                try:
                    self._cached = require_credentials(self._source())
                except Exception as error:
                    self.failure = error
                    raise
                self.failure, self.identity = None, self._cached.identity
                self._ask_again_at_s = time.monotonic() + ask_again_after_s(self._cached)
            return self._cached.for_obstore()
