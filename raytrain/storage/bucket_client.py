"""A process's client for a prefix of a bucket: obstore with timeouts and credentials, and a check of the server."""

# obstore's types refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import AzureStore, GCSStore, S3Store

from raytrain.errors import StorageError
from raytrain.storage.clouds.cloud import Cloud, is_loopback
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import CredentialCache, Credentials, CredentialSource, require_credentials
from raytrain.storage.retries_and_hedges import DEFAULT, INITIAL_WAIT_S, MAX_WAIT_S

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

ObjectStore = S3Store | AzureStore | GCSStore
_OBSTORE_CLASSES: dict[str, Any] = {"s3": S3Store, "az": AzureStore, "gs": GCSStore}

TIMEOUTS: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(minutes=30),  # of a whole transfer: a checkpoint may take long, as long as bytes arrive
}
# obstore retries only the parts of large uploads. with_retries retries, and counts, all other requests of stores.
RETRIES: RetryConfig = {
    "max_retries": DEFAULT.max_retries,
    "retry_timeout": timedelta(seconds=DEFAULT.max_duration_s),
    "backoff": {
        "init_backoff": timedelta(seconds=INITIAL_WAIT_S),
        "max_backoff": timedelta(seconds=MAX_WAIT_S),
        "base": 2,
    },
}
FEWEST_PARTS = 4  # of a large upload that are sent at a time, also over a slow line
_NO_RETRIES: RetryConfig = {**RETRIES, "max_retries": 0}
_PAGE_CHECK_S = 5.0  # time in which the server must answer; after it, the check of its pages is left out


@dataclass(frozen=True)
class BucketConnection:
    """What a client needs to reach a prefix of a bucket.

    Stores with equal connections share a client in each process.
    """

    url: str
    cloud: Cloud
    credentials: CredentialSource = field(compare=False, repr=False)
    connection_id: str = field(repr=False)
    """Distinguishes connections with different credentials, in every process that a store is sent to."""
    multipart: bool = False  # upload in parts, each of which obstore retries
    request_s: float | None = None  # limit for one request; None: half an hour


class BucketClient:
    """A process's client for a connection, whose obstore is replaced when its credentials are refused."""

    def __init__(self, connection: BucketConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.credentials = CredentialCache(connection.credentials)
        self.obstore = self._connect()
        self._pages_are_checked = False  # True once the server has shown that it says how a listing continues
        self._names_per_page = 1000  # as in S3, or fewer, as the server has shown; a page with fewer is the last one

    def renewed(self, refused: ObjectStore) -> ObjectStore:
        """Return an obstore that asks for new credentials, in place of ``refused``, whose credentials were refused.

        All threads that were refused share the new one.
        """
        with self._lock:
            if self.obstore is refused:
                self.credentials = CredentialCache(self._connection.credentials, self.credentials.identity)
                self.obstore = self._connect()
            return self.obstore

    def _connect(self) -> ObjectStore:
        """Return a new obstore with the credentials that ``self.credentials`` gives it; sends no request."""
        cloud, (bucket, root) = self._connection.cloud, bucket_and_root(self._connection.url)
        options = client_options(cloud)
        if self._connection.request_s is not None:
            options["timeout"] = options["read_timeout"] = timedelta(seconds=self._connection.request_s)
        if self._connection.multipart:
            # The limit until the answer begins includes the time in which a part is sent, beside the others.
            options["read_timeout"] = timedelta(seconds=FEWEST_PARTS * read_timeout_s())
        return _OBSTORE_CLASSES[cloud.name](
            bucket,
            prefix=root.rstrip("/") or None,
            config=cloud.obstore_config(bucket),
            client_options=options,
            retry_config=RETRIES if self._connection.multipart else _NO_RETRIES,
            credential_provider=self.credentials,
        )

    def check_pages(self) -> None:
        """Raise StorageError if an S3 server does not say how a listing continues after its first page.

        obstore would take such a page for the last one, or ask for it for ever, and no later request would show the
        mistake. So boto3 requests the first two pages below the connection's URL, once in each process, both with and
        without folders, as obstore does. A server that does not answer this within five seconds is left to the caller's
        own request.
        """
        cloud, url = self._connection.cloud, self._connection.url
        if not isinstance(cloud, S3) or self._pages_are_checked:
            return
        try:
            # list_pages raises StorageError for such a server. A page that another one follows shows how many names the
            # server puts into one.
            keys = self.s3_keys()
            for delimiter in ("", "/"):
                pages = cloud.list_pages(
                    *bucket_and_root(url), keys, delimiter, max_attempts=1, read_timeout_s=_PAGE_CHECK_S
                )
                for page in islice(pages, 2):
                    if page.get("IsTruncated"):
                        num_names = len(page.get("Contents", ())) + len(page.get("CommonPrefixes", ()))
                        self._names_per_page = min(self._names_per_page, num_names)
        except StorageError:
            raise
        except Exception:  # left to the caller's own request, which is retried and explained
            return
        self._pages_are_checked = True

    def may_fill_a_page(self, num_names: int) -> bool:
        """Return True if ``num_names`` names may be one page of S3 and not all. Other clouds have no such doubt."""
        return isinstance(self._connection.cloud, S3) and num_names >= self._names_per_page

    def s3_keys(self) -> Credentials | None:
        """Return the keys for requests by boto3; None if the bucket, which is one of S3, is read without any.

        Raises NoCredentials, and what the source of the credentials raises.
        """
        cloud = self._connection.cloud
        assert isinstance(cloud, S3)
        keys = None if cloud.unsigned else require_credentials(self._connection.credentials())
        assert keys is None or isinstance(keys, Credentials)
        return keys


def read_timeout_s() -> float:
    """Return the seconds within which the answer to a request must begin, and go on."""
    limit = TIMEOUTS.get("read_timeout")
    assert isinstance(limit, timedelta)
    return limit.total_seconds()


def client_options(cloud: Cloud) -> ClientConfig:
    """Return obstore's options: timeouts, proxies, and the certificates that this process's environment names.

    Raises StorageError if the file with certificates cannot be read.
    """
    options: ClientConfig = {**TIMEOUTS}
    if cloud.endpoint_url:
        options["allow_http"] = cloud.endpoint_url.startswith("http://")
    # No proxy reaches this machine's own servers, and obstore takes HTTP_PROXY unless it is given a proxy.
    if is_loopback(cloud.endpoint_url):
        options["proxy_url"], options["proxy_excludes"] = "http://localhost", "localhost,127.0.0.0/8,::1"
    # Try the file of certificates first, because obstore would not say that it cannot read it.
    variable = cloud.sentences.certificates_variable
    if file := os.environ.get(variable):
        try:
            ssl.create_default_context(cafile=file)
            options["root_certificate"] = Path(file).read_bytes()
        except OSError as error:  # SSLError is an OSError
            raise StorageError(
                f"{variable} is {file}, which contains no readable certificates; correct or remove it."
            ) from error
    return options


def bucket_and_root(url: str) -> tuple[str, str]:
    """Return the bucket of ``url``, and the text that the names of all objects below ``url`` start with.

    Example: ``bucket_and_root("s3://photos/2024") == ("photos", "2024/")``
    """
    bucket, _, prefix = url.partition("://")[2].partition("/")
    return bucket, prefix and f"{prefix}/"
