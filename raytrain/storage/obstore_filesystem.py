"""Buckets that are not in S3 as fsspec sees them: obstore's own file system."""

# fsspec has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any, Literal, cast

from obstore.fsspec import FsspecStore

from raytrain.storage.base import BucketSettings, cloud_name
from raytrain.storage.bucket_client import RETRIES, CredentialCache, client_options
from raytrain.storage.cloud import cloud_of


class ObstoreFileSystem(FsspecStore):
    """obstore's file system with the endpoint and the credentials of raytrain's own storage.

    It is pickled without credentials, and keeps no listings, because a run may write new files at any time.
    """

    cachable = False  # a new one sees the configuration as it is now

    def __init__(self, url: str, settings: BucketSettings, **options: Any) -> None:
        cloud = cloud_of(url)
        super().__init__(
            cast(Literal["az", "gs"], cloud_name(url)),
            config=cloud.config(settings),
            client_options=client_options(url, settings),
            retry_config=RETRIES,
            credential_provider=CredentialCache(cloud.credentials),
            **options,
        )
