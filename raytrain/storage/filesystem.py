"""Buckets for pandas, pyarrow, notebooks and archives, as file systems of fsspec."""

# fsspec, s3fs and aiobotocore have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from obstore.fsspec import FsspecStore
from s3fs import S3FileSystem

from raytrain.storage.bucket_client import RETRIES, client_options
from raytrain.storage.clouds.azure import Azure
from raytrain.storage.clouds.google import Google
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import CredentialCache, Credentials, CredentialSource
from raytrain.storage.open import check_url, configured_cloud


class BucketFileSystem(S3FileSystem):
    """s3fs with the endpoint and the credentials of raytrain's own storage, which it asks for again before they expire.

    It is pickled as the source of its credentials, so that neither its pickle nor its text contains a secret. It keeps
    no listings, because a run may write new files at any time.
    """

    cachable = False  # a new one sees the AWS configuration as it is now

    def __init__(self, source: CredentialSource, cloud: S3, **options: Any) -> None:
        super().__init__(
            session=_Session(source),
            anon=cloud.unsigned,
            requester_pays=cloud.requester_pays,
            endpoint_url=cloud.endpoint_url,
            client_kwargs={"region_name": cloud.region or "us-east-1"},
            config_kwargs={**cloud.boto_config(), "request_checksum_calculation": "when_required"},
            use_listings_cache=False,
            **options,
        )


class _Session(AioSession):
    """A session whose clients sign with the credentials of a source."""

    def __init__(self, source: CredentialSource) -> None:
        super().__init__()
        self._credentials = _CurrentCredentials(source)


class _CurrentCredentials(AioCredentials):
    """The credentials of a source for each request of aiobotocore.

    The source runs in a thread, because it may wait for a sign-in service while other requests are in flight.
    """

    def __init__(self, source: CredentialSource) -> None:
        super().__init__("", "", method="raytrain")
        self._cache = CredentialCache(source)

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        keys = await asyncio.to_thread(self._cache.current)
        assert isinstance(keys, Credentials)
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, keys.session_token)


class ObstoreFileSystem(FsspecStore):
    """obstore's file system, for other clouds, with the endpoint and the credentials of raytrain's own storage.

    It is pickled without credentials, and keeps no listings.
    """

    cachable = False  # a new one sees the configuration as it is now

    def __init__(self, cloud: Azure | Google, **options: Any) -> None:
        super().__init__(
            cloud.name,
            config=cloud.obstore_config(""),
            client_options=client_options(cloud),
            retry_config=RETRIES,
            credential_provider=CredentialCache(cloud.credentials),
            **options,
        )


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
    cloud = configured_cloud(url)
    if isinstance(cloud, S3):
        return BucketFileSystem(cloud.credentials, cloud)
    assert isinstance(cloud, Azure | Google)
    return ObstoreFileSystem(cloud)
