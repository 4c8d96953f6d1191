"""A process's client for a prefix of a bucket: obstore with retries, timeouts and current credentials."""

# obstore's types refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.exceptions import InvalidPathError

from raytrain.errors import StorageError
from raytrain.storage.base import BucketSettings
from raytrain.storage.cloud import cloud_of
from raytrain.storage.cloud_sentences import sentences_of
from raytrain.storage.credentials import BucketCredentials, CredentialSource, required
from raytrain.storage.error_sentences import explain
from raytrain.storage.request_errors import names_no_bucket, refuses_credentials
from raytrain.storage.retry import DEFAULT, INITIAL_WAIT_S, MAX_WAIT_S, RetryPolicy, with_retries

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    ObjectStore = S3Store | AzureStore | GCSStore

T = TypeVar("T")

_RENEW_BEFORE_EXPIRY = timedelta(minutes=5)
_CLIENT_OPTIONS: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(minutes=30),  # of a whole transfer: a checkpoint may take long, as long as bytes arrive
}
# Of requests by stores, obstore retries parts of uploads only; all others are retried, and counted, by with_retries.
RETRIES: RetryConfig = {
    "max_retries": DEFAULT.max_retries,
    "retry_timeout": timedelta(seconds=DEFAULT.max_duration_s),
    "backoff": {
        "init_backoff": timedelta(seconds=INITIAL_WAIT_S),
        "max_backoff": timedelta(seconds=MAX_WAIT_S),
        "base": 2,
    },
}
_NO_RETRIES: RetryConfig = {**RETRIES, "max_retries": 0}


class UnusableNames(StorageError):
    """An object's name, or one in a listing, cannot be used."""


class BucketClient:
    """One process's client for ``url``, with its open connections. They are replaced when the credentials are refused.

    With ``multipart``, obstore retries each part of an upload.
    """

    def __init__(self, url: str, settings: BucketSettings, credentials: CredentialSource, *, multipart: bool) -> None:
        self._url = url
        self._settings = settings
        self._source = credentials
        self._multipart = multipart
        self._lock = threading.Lock()
        self._credentials = CredentialCache(credentials)
        self._client = self._connect()

    def call(self, path: str, operation: Callable[[ObjectStore], T], retry_policy: RetryPolicy) -> T:
        """Send a request; once more with new credentials if these are refused. Raises as :meth:`explained` does."""
        client = self._client
        with self.explained(path):
            try:
                return with_retries(lambda: operation(client), retry_policy)
            except Exception as error:
                if not refuses_credentials(error):
                    raise
            renewed = self._renewed(client)
            return with_retries(lambda: operation(renewed), retry_policy)

    @contextmanager
    def explained(self, path: str) -> Generator[None, None, None]:
        """Raise every error as a StorageError, or as FileNotFoundError if there is no object ``path``."""
        url = f"{self._url}/{path}".rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            if not names_no_bucket(error):
                raise FileNotFoundError(url) from None
            raise self._explain(error, url) from error
        except InvalidPathError as error:
            raise UnusableNames(str(self._explain(error, url))) from error
        except Exception as error:
            raise self._explain(error, url) from error

    def _explain(self, error: Exception, url: str) -> StorageError:
        cause = self._credentials.failure or error
        return explain(cause, url, endpoint_url=self._settings.endpoint_url, identity=self._credentials.identity)

    def _renewed(self, refused: ObjectStore) -> ObjectStore:
        """Return the client that replaces ``refused``; created once, however many threads were refused."""
        with self._lock:
            if self._client is refused:
                self._credentials = CredentialCache(self._source, self._credentials.identity)
                self._client = self._connect()
            return self._client

    def _connect(self) -> ObjectStore:
        cloud = cloud_of(self._url)
        bucket, root = bucket_and_root(self._url)
        return cloud.store_class()(
            bucket,
            prefix=root.rstrip("/") or None,
            config=cloud.config(self._settings),
            client_options=client_options(self._url, self._settings),
            retry_config=RETRIES if self._multipart else _NO_RETRIES,
            credential_provider=self._credentials,
        )


class CredentialCache:
    """Keeps credentials for obstore until shortly before they expire: obstore then asks ten times a second."""

    def __init__(self, source: CredentialSource, identity: str | None = None) -> None:
        self._source = source
        self.identity = identity
        """What may be shown of the last credentials."""
        self._cached: BucketCredentials | None = None
        self._renew_at: datetime | None = None
        self.failure: Exception | None = None
        """Why the source failed the last time, if it did; obstore passes on only the text."""

    def __call__(self) -> Any:
        if self._cached is None or (self._renew_at is not None and _now() >= self._renew_at):
            self._cached = self._renewed()
        return self._cached.for_obstore()

    def _renewed(self) -> BucketCredentials:
        try:
            credentials = required(self._source())
        except Exception as error:
            self.failure = error
            raise
        self.failure = None
        self.identity = credentials.identity
        if credentials.expires_at is not None:
            remaining = credentials.expires_at - _now()
            self._renew_at = credentials.expires_at - min(_RENEW_BEFORE_EXPIRY, remaining / 4)
        return credentials


def client_options(url: str, settings: BucketSettings) -> ClientConfig:
    """Timeouts, and the certificates that this process's environment names."""
    options: ClientConfig = {**_CLIENT_OPTIONS}
    if settings.endpoint_url:
        options["allow_http"] = settings.endpoint_url.startswith("http://")
    variable = sentences_of(url).certificates_variable
    if certificates := os.environ.get(variable):
        options["root_certificate"] = _read_certificates(certificates, variable)
    return options


def bucket_and_root(url: str) -> tuple[str, str]:
    """Return the bucket, and what the names of all objects below ``url`` start with."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    return bucket, prefix and f"{prefix}/"


def _read_certificates(file: str, variable: str) -> bytes:
    try:
        ssl.create_default_context(cafile=file)
        return Path(file).read_bytes()
    except OSError as error:  # SSLError is an OSError
        raise StorageError(
            f"{variable} is {file}, which contains no readable certificates; correct or remove it."
        ) from error


def _now() -> datetime:
    return datetime.now(timezone.utc)
