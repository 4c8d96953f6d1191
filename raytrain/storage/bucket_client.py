"""A process's client for a prefix of a bucket: obstore with retries, timeouts and current credentials."""

# obstore's types refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.exceptions import InvalidPathError
from obstore.store import AzureStore, GCSStore, S3Store

from raytrain.errors import OwnerChanged, StorageError
from raytrain.storage.clouds.cloud import Cloud, is_loopback
from raytrain.storage.credentials import CredentialCache
from raytrain.storage.request_errors import explain, is_transient, names_no_bucket, refuses_credentials

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

    from raytrain.storage.bucket import BucketStore

ObjectStore = S3Store | AzureStore | GCSStore
_OBSTORE_CLASSES: dict[str, Any] = {"s3": S3Store, "az": AzureStore, "gs": GCSStore}
T = TypeVar("T")

INITIAL_WAIT_S = 0.1
MAX_WAIT_S = 15.0
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is retried, and for how long."""

    max_retries: int
    max_duration_s: float  # measured from the first attempt; no retry starts later


DEFAULT = RetryPolicy(100, 180.0)
"""Limited by its duration: if half of all requests fail, one in a thousand needs ten retries."""
FAIL_FAST = RetryPolicy(2, 10.0)

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
    """A process's client for ``store`` and all its copies, replaced when its credentials are refused."""

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._credentials = CredentialCache(store.credentials)
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
    def explained(self, path: str) -> Generator[None]:
        """Raise every error as a StorageError, or as FileNotFoundError if there is no object ``path``."""
        url = f"{self._store.url}/{path}".rstrip("/")
        try:
            yield
        except OwnerChanged:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not names_no_bucket(error):
                raise FileNotFoundError(url) from None
            sentence = explain(self._credentials.failure or error, url, self._store.cloud, self._credentials.identity)
            raise (UnusableNames(str(sentence)) if isinstance(error, InvalidPathError) else sentence) from error

    def _renewed(self, refused: ObjectStore) -> ObjectStore:
        """Return the client that replaces ``refused``; created once, however many threads were refused."""
        with self._lock:
            if self._client is refused:
                self._credentials = CredentialCache(self._store.credentials, self._credentials.identity)
                self._client = self._connect()
            return self._client

    def _connect(self) -> ObjectStore:
        store, (bucket, root) = self._store, bucket_and_root(self._store.url)
        options = client_options(store.cloud)
        if store.request_s is not None:
            options["timeout"] = timedelta(seconds=store.request_s)
        return _OBSTORE_CLASSES[store.cloud.name](
            bucket,
            prefix=root.rstrip("/") or None,
            config=store.cloud.obstore_config(bucket),
            client_options=options,
            retry_config=RETRIES if store.multipart else _NO_RETRIES,  # of parts
            credential_provider=self._credentials,
        )


def client_options(cloud: Cloud) -> ClientConfig:
    """Timeouts, the certificates that this process's environment names, and no proxy for this machine's own servers."""
    options: ClientConfig = {**_CLIENT_OPTIONS}
    if cloud.endpoint_url:
        options["allow_http"] = cloud.endpoint_url.startswith("http://")
    if is_loopback(cloud.endpoint_url):  # obstore takes HTTP_PROXY, unless it is given a proxy
        options["proxy_url"], options["proxy_excludes"] = "http://localhost", "localhost,127.0.0.0/8,::1"
    variable = cloud.sentences.certificates_variable
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


# Retries, with exponential backoff and full jitter.


_retried: deque[None] = deque()  # an entry for each retry since they were counted last, by any thread


def take_num_retries() -> int:
    """How many requests this process has retried since the last call."""
    num_retries = 0
    with suppress(IndexError):
        while True:
            _retried.popleft()
            num_retries += 1
    return num_retries


def with_retries(operation: Callable[[], T], policy: RetryPolicy) -> T:
    """Call ``operation``, and again after transient errors. Raises the last error if ``policy`` allows no more."""
    give_up_at = time.monotonic() + policy.max_duration_s
    for number in range(policy.max_retries):
        try:
            return operation()
        except Exception as error:
            if not is_transient(error) or time.monotonic() >= give_up_at:
                raise
            _retried.append(None)
            if not _waited(random.uniform(0.0, min(MAX_WAIT_S, INITIAL_WAIT_S * 2**number))):
                raise
    return operation()


def _waited(seconds: float) -> bool:
    """Wait for so long; False if meanwhile this process is about to end, for which Python waits for all requests."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, _LOOK_EVERY_S))
        try:
            _probe(os.getpid()).submit(int)
        except RuntimeError:  # Python tells it in no other way that is public
            return False
    return True


@cache
def _probe(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)
