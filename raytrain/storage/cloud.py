"""What differs between clouds: how a bucket is reached, and whose credentials are used."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from raytrain.errors import UsageError
from raytrain.storage.base import BucketSettings, cloud_name
from raytrain.storage.credentials import BucketCredentials

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store


class Cloud(ABC):
    """One cloud, as this process's environment configures it. Can be pickled, and contains no secret."""

    @abstractmethod
    def settings(self, url: str) -> BucketSettings:
        """Where ``url`` is reached. Raises UsageError or StorageError if the configuration is broken."""

    @abstractmethod
    def credentials(self) -> BucketCredentials | None:
        """This process's credentials, valid now; None if there are none. Raises what its libraries raise."""

    @abstractmethod
    def store_class(self) -> type[S3Store] | type[AzureStore] | type[GCSStore]:
        """The kind of store that obstore has for it."""

    @abstractmethod
    def config(self, settings: BucketSettings) -> Any:
        """The same settings as that store wants them."""


def cloud_of(url: str) -> Cloud:
    """Return the cloud that ``url`` is in."""
    if cloud_name(url) == "az":
        from raytrain.storage.azure import Azure

        return Azure()
    if cloud_name(url) == "gs":
        from raytrain.storage.google import Google

        return Google()
    from raytrain.storage.s3 import S3

    return S3()


def checked_endpoint(endpoint_url: str, variable: str, key_variables: str) -> str:
    """Return a URL that was found in ``variable``; raises UsageError if it is none, or contains credentials.

    ``key_variables`` are where credentials belong.
    """
    if "@" in endpoint_url or "?" in endpoint_url:  # not shown: it may be secret
        raise UsageError(
            f"{variable} must look like https://host or http://host:port, without a user name, a password or a "
            f"query; set {key_variables} instead."
        )
    if not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", endpoint_url):
        raise UsageError(f"{variable} is {endpoint_url!r}; it must look like https://host or http://host:port.")
    return endpoint_url
