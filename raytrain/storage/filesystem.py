"""Buckets as fsspec sees them, for pandas, pyarrow, notebooks, and the files that commands read and write."""

# fsspec, s3fs and aiobotocore have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import BotoCoreError
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from obstore.exceptions import BaseError
from s3fs import S3FileSystem

from raytrain.errors import StorageError
from raytrain.storage.base import S3Settings
from raytrain.storage.cloud import cloud_of
from raytrain.storage.credentials import (
    Credentials,
    NoCredentials,
    ask_again_after_s,
    required,
    resolve,
)
from raytrain.storage.error_sentences import explain
from raytrain.storage.open import check_url
from raytrain.storage.request_errors import names_no_bucket

AwsSource = Callable[[], "Credentials | None"]


class BucketFileSystem(S3FileSystem):
    """s3fs with the endpoint and the credentials of raytrain's own storage, which it asks for again before they expire.

    It is pickled as the source of its credentials, so that neither its pickle nor its text contains a secret. It keeps
    no listings, because a run may write new files at any time.
    """

    cachable = False  # a new one sees the AWS configuration as it is now

    def __init__(self, source: AwsSource, settings: S3Settings, **options: Any) -> None:
        super().__init__(
            session=_Session(source),
            endpoint_url=settings.endpoint_url,
            client_kwargs={"region_name": settings.region or "us-east-1"},
            config_kwargs={"s3": {"addressing_style": "path"}, "request_checksum_calculation": "when_required"},
            use_listings_cache=False,
            **options,
        )


class _Session(AioSession):
    """A session whose clients sign with the credentials of a source."""

    def __init__(self, source: AwsSource) -> None:
        super().__init__()
        self._credentials = _CurrentCredentials(source)


class _CurrentCredentials(AioCredentials):
    """What aiobotocore signs each request with: the source's credentials, asked for again after a minute at the latest.

    The source runs in a thread, because it may wait for a sign-in service while other requests are in flight.
    """

    def __init__(self, source: AwsSource) -> None:
        super().__init__("", "", method="raytrain")
        self._source = source
        self._lock = asyncio.Lock()
        self._ask_again_at_s = 0.0
        self._current: Credentials | None = None

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        async with self._lock:
            if self._current is None or time.monotonic() >= self._ask_again_at_s:
                self._current = required(await asyncio.to_thread(self._source))
                self._ask_again_at_s = time.monotonic() + ask_again_after_s(self._current)
        keys = self._current
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, keys.session_token)


def filesystem(url: str) -> AbstractFileSystem:
    """Return the fsspec file system of ``url``: an ``s3fs.S3FileSystem`` for ``s3://…``, one of obstore for another
    cloud, else the local one.

    It uses the same credentials and endpoint as every command, and learns of renewed credentials. Its methods and what
    takes a file system (pyarrow) accept whole URLs or ``bucket/path``::

        fs = raytrain.filesystem("s3://bucket")
        pandas.read_json(fs.open("s3://bucket/runs/first/metrics.jsonl"), lines=True)
        pyarrow.dataset.dataset("bucket/runs/first/manifest.parquet", filesystem=fs)

    Raises:
        UsageError: the URL is of another kind, or contains credentials.
        StorageError: the configuration of the cloud is broken.
    """
    if "://" not in url:
        return LocalFileSystem()
    check_url(url)
    settings = cloud_of(url).settings(url)
    if isinstance(settings, S3Settings):
        return BucketFileSystem(resolve, settings)
    from raytrain.storage.obstore_filesystem import ObstoreFileSystem

    return ObstoreFileSystem(url, settings)


def read_object(url: str) -> bytes:
    """Return the content of an object, such as ``s3://bucket/name``. Raises StorageError if it cannot be read."""
    with _explained(url):
        content = filesystem(url).cat_file(url)
    assert isinstance(content, bytes)
    return content


def write_object(url: str, content: bytes) -> None:
    """Write or replace the object ``url``. Raises StorageError if it cannot be written."""
    with _explained(url):
        filesystem(url).pipe_file(url, content)


def upload_object(file: Path, url: str) -> None:
    """Write or replace the object ``url`` with a file, in parts. Raises StorageError if that fails."""
    with _explained(url):
        filesystem(url).put_file(str(file), url)


@contextmanager
def _explained(url: str) -> Generator[None, None, None]:
    """Raise what a file system raises as a StorageError: s3fs gives S3's own answer as the cause."""
    try:
        yield
    except (OSError, BotoCoreError, BaseError, NoCredentials) as error:
        cause = error.__cause__ or error
        if isinstance(error, FileNotFoundError) and not names_no_bucket(cause):
            raise StorageError(f"There is no file {url}; check the path.") from None
        raise explain(cause, url, endpoint_url=cloud_of(url).settings(url).endpoint_url) from error
