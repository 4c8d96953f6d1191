"""Azure Blob Storage: account, endpoint and credentials from this process's environment."""

# azure-identity is an optional dependency.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import base64
import os
import re
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any

from raytrain.errors import StorageError, UsageError
from raytrain.storage.base import AzureSettings, BucketSettings
from raytrain.storage.cloud import Cloud, checked_endpoint
from raytrain.storage.credentials import AzureCredentials

if TYPE_CHECKING:
    from obstore.store import AzureStore

_SCOPE = "https://storage.azure.com/.default"


class Azure(Cloud):
    """Azure Blob Storage, and servers that speak its protocol."""

    def settings(self, url: str) -> AzureSettings:
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise UsageError(f"AZURE_STORAGE_ACCOUNT_NAME is not set; set it to the storage account of {url}.")
        endpoint_url = os.environ.get("AZURE_STORAGE_ENDPOINT") or f"https://{account}.blob.core.windows.net"
        checked_endpoint(endpoint_url, "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_KEY")
        return AzureSettings(account, endpoint_url.rstrip("/"))

    def credentials(self) -> AzureCredentials | None:
        if key := os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
            return AzureCredentials("access_key", _checked_key(key))
        if signature := os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
            return AzureCredentials("sas_token", signature)
        return _access_token()

    def store_class(self) -> type[AzureStore]:
        from obstore.store import AzureStore

        return AzureStore

    def config(self, settings: BucketSettings) -> dict[str, Any]:
        assert isinstance(settings, AzureSettings)
        # obstore would ask an emulator instead if a variable of its own said so.
        return {"account_name": settings.account, "endpoint": settings.endpoint_url, "use_emulator": False}


def _checked_key(key: str) -> str:
    try:
        base64.b64decode(key, validate=True)
    except ValueError:
        raise StorageError(
            "AZURE_STORAGE_ACCOUNT_KEY is not the key of a storage account, which is written in base64; copy it anew."
        ) from None
    return key


def _access_token() -> AzureCredentials | None:
    """A token from azure-identity: of a service principal, workload or managed identity, or of ``az login``."""
    try:
        from azure.core.exceptions import ClientAuthenticationError
    except ImportError:
        return None
    try:
        found = _identity().get_token(_SCOPE)
    except ClientAuthenticationError as error:
        if refusal := re.search(r"AADSTS\d+: [^\n]*", str(error)):  # as opposed to nobody who could sign in
            raise StorageError(f"Azure refuses the sign-in ({refusal[0].rstrip('. ')}); sign in again.") from None
        return None
    return AzureCredentials("token", found.token, datetime.fromtimestamp(found.expires_on, timezone.utc))


@cache
def _identity() -> Any:
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential()
