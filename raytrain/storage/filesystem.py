"""Buckets for pandas, pyarrow, notebooks and archives, as file systems of fsspec."""

# fsspec and s3fs have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from obstore.fsspec import FsspecStore
from s3fs import S3FileSystem

from raytrain.config.option_values import Location
from raytrain.storage.bucket_client import RETRIES, client_options
from raytrain.storage.clouds.azure import Azure
from raytrain.storage.clouds.google import Google
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import CredentialCache
from raytrain.storage.open import check_folder_name, check_url, configured_cloud


def filesystem(url: Location) -> AbstractFileSystem:
    """Return the fsspec file system of ``url``: an ``s3fs.S3FileSystem`` for ``s3://…``, one of obstore for another
    cloud, else the local one.

    It uses the same credentials and endpoint as every command, and learns of renewed credentials. Neither its pickle
    nor its text contains a secret. It keeps no listings, because a run may write new files at any time. Its methods and
    what takes a file system (pyarrow) accept whole URLs or ``bucket/path``::

        fs = raytrain.filesystem("s3://bucket")
        pandas.read_json(fs.open("s3://bucket/runs/first/metrics.jsonl"), lines=True)
        pyarrow.dataset.dataset("bucket/runs/first/manifest.parquet", filesystem=fs)

    Raises UsageError for a URL of another kind or with credentials, StorageError if its cloud is configured wrongly.
    """
    url = os.fspath(url)
    if "://" not in url:
        check_folder_name(url)
        return LocalFileSystem()
    check_url(url)
    cloud = configured_cloud(url)
    if not isinstance(cloud, S3):
        assert isinstance(cloud, Azure | Google)
        return ObstoreFileSystem(cloud)
    # s3fs looks up the credentials itself, as boto3 does. It has no cache, to see the AWS configuration as it is now.
    return S3FileSystem(
        anon=cloud.unsigned,
        requester_pays=cloud.requester_pays,
        endpoint_url=cloud.endpoint_url,
        client_kwargs={"region_name": cloud.region or "us-east-1"},
        config_kwargs={**cloud.boto_config(), "request_checksum_calculation": "when_required"},
        use_listings_cache=False,
        skip_instance_cache=True,
    )


class ObstoreFileSystem(FsspecStore):
    """obstore's file system for other clouds, which looks up the credentials of ``cloud`` where it is used."""

    cachable = False  # fsspec makes a new one each time, which sees the configuration as it is now

    def __init__(self, cloud: Azure | Google, **options: Any) -> None:
        scheme: Any = cloud.name
        config: Any = cloud.obstore_config("")
        super().__init__(
            scheme,
            config=config,
            client_options=client_options(cloud),
            retry_config=RETRIES,
            credential_provider=CredentialCache(cloud.credentials),
            **options,
        )
