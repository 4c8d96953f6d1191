"""Azure Blob Storage: account, endpoint and credentials from the environment, and the meaning of its answers."""

# azure-identity is an optional dependency.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any

from raytrain.config.extras import extra
from raytrain.errors import StorageError, UsageError
from raytrain.storage.clouds.cloud import Cloud, CloudSentences, check_endpoint
from raytrain.storage.credentials import AzureCredentials

_SCOPE = "https://storage.azure.com/.default"

_REFUSES = (
    "{endpoint} does not accept the {identity}; check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, "
    "or sign in again (az login)."
)
_TOO_EARLY = "The container {bucket} is being deleted; try again later, or choose another one."

_SENTENCES = CloudSentences(
    endpoint="Azure Blob Storage",
    protocol="Azure Blob Storage",
    endpoint_variable="AZURE_STORAGE_ENDPOINT",
    host_variables="AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT",
    certificates_variable="REQUESTS_CA_BUNDLE",  # which Azure's own command line and azure-identity read
    any_identity="credentials",
    no_credentials=(
        "There are no Azure credentials for {url}; set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or "
        f"install {extra('azure')} and sign in (az login), or give the machine an identity."
    ),
    not_obtained="The Azure credentials for {url} could not be obtained ({detail}); check them, or sign in (az login).",
    refuses_credentials=_REFUSES,
    no_permission=(
        "The {identity} has no permission for {url}; give it the role Storage Blob Data Reader, "
        "and to write Storage Blob Data Contributor."
    ),
    by_code={
        "ContainerBeingDeleted": _TOO_EARLY,
        "BlobArchived": "{url} is archived; rehydrate it (az storage blob set-tier), or leave it out.",
        **dict.fromkeys(("AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"), _REFUSES),
        "AuthorizationFailure": _REFUSES[:-1] + ", and the firewall of the storage account.",
        "KeyBasedAuthenticationNotPermitted": (
            f"{{endpoint}} allows no account keys; install {extra('azure')}, remove AZURE_STORAGE_ACCOUNT_KEY "
            "and sign in (az login)."
        ),
    },
)


@dataclass(frozen=True)
class Azure(Cloud):
    """Azure Blob Storage, and servers that speak its protocol."""

    name = "az"
    sentences = _SENTENCES
    account: str
    endpoint_url: str  # pyright: ignore[reportIncompatibleVariableOverride] ; never None

    @classmethod
    def configured(cls, url: str) -> Azure:
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise UsageError(f"AZURE_STORAGE_ACCOUNT_NAME is not set; set it to the storage account of {url}.")
        endpoint_url = os.environ.get("AZURE_STORAGE_ENDPOINT") or f"https://{account}.blob.core.windows.net"
        check_endpoint(endpoint_url, "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_KEY")
        return Azure(account, endpoint_url.rstrip("/"))

    def credentials(self) -> AzureCredentials | None:
        if key := os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
            try:
                base64.b64decode(key, validate=True)
            except ValueError:
                raise StorageError(
                    "AZURE_STORAGE_ACCOUNT_KEY is not the key of a storage account, which is written in base64; copy "
                    "it anew."
                ) from None
            return AzureCredentials("access_key", key)
        if signature := os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
            return AzureCredentials("sas_token", signature)

        # A token of azure-identity, for a service principal, a workload or managed identity, or ``az login``. There is
        # none without azure-identity, or if it finds no way to sign in.
        try:
            from azure.core.exceptions import ClientAuthenticationError

            credential = default_credential()
        except ImportError:
            return None
        try:
            token = credential.get_token(_SCOPE)
        except ClientAuthenticationError as error:
            default_credential.cache_clear()  # the next call finds other variables or a new sign-in
            if refusal := re.search(r"AADSTS\d+: [^\n]*", str(error)):  # else there was no way to sign in
                raise StorageError(f"Azure refuses the sign-in ({refusal[0].rstrip('. ')}); sign in again.") from None
            return None
        return AzureCredentials("token", token.token, datetime.fromtimestamp(token.expires_on, timezone.utc))

    def obstore_config(self, bucket: str) -> dict[str, Any]:
        # obstore would ask an emulator instead if a variable of its own said so.
        return {"account_name": self.account, "endpoint": self.endpoint_url, "use_emulator": False}


@cache
def default_credential() -> Any:
    """Return azure-identity's chain of sign-ins, which keeps and renews its token; raise ImportError without it."""
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential()
