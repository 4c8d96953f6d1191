"""Google Cloud Storage: endpoint and credentials from this process's environment."""

# google-auth is an optional dependency, and has no types.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any

from raytrain.errors import StorageError
from raytrain.storage.base import BucketSettings, GoogleSettings
from raytrain.storage.cloud import Cloud, checked_endpoint
from raytrain.storage.credentials import GoogleCredentials

if TYPE_CHECKING:
    from obstore.store import GCSStore

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class Google(Cloud):
    """Google Cloud Storage, or an emulator of it."""

    def settings(self, url: str) -> GoogleSettings:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        if not emulator:
            return GoogleSettings()
        endpoint_url = emulator if "://" in emulator else f"http://{emulator}"
        checked_endpoint(endpoint_url, "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS")
        return GoogleSettings(endpoint_url.rstrip("/"))

    def credentials(self) -> GoogleCredentials | None:
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            return GoogleCredentials("anonymous")  # an emulator needs none, and should not be shown any
        return _access_token()

    def store_class(self) -> type[GCSStore]:
        from obstore.store import GCSStore

        return GCSStore

    def config(self, settings: BucketSettings) -> dict[str, Any]:
        return {"base_url": settings.endpoint_url} if settings.endpoint_url else {}


def _access_token() -> GoogleCredentials | None:
    """A token from google-auth: of a service account, of ``gcloud auth application-default login`` or of a machine."""
    try:
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
        from google.auth.transport.requests import Request
    except ImportError:
        return None
    file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    try:
        found = _found(file)
        if not found.valid:  # it is not, from some minutes before it expires
            found.refresh(Request())
    except GoogleAuthError as error:
        if isinstance(error, DefaultCredentialsError) and not file:
            return None
        reason = str(error.args[0]).partition("\n")[0].rstrip(". ")
        raise StorageError(
            f"Google gave no access token ({reason}); check GOOGLE_APPLICATION_CREDENTIALS, or sign in again "
            "(gcloud auth application-default login)."
        ) from None
    expires_at: datetime | None = found.expiry and found.expiry.replace(tzinfo=timezone.utc)
    return GoogleCredentials(found.token, expires_at)


@cache
def _found(file: str | None) -> Any:
    """google-auth's credentials, which come first from ``file``, and renew their token."""
    import google.auth

    return google.auth.default(scopes=[_SCOPE])[0]
