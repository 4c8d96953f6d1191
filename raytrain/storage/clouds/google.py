"""Google Cloud Storage: endpoint and credentials from the environment, and the meaning of its answers."""

# google-auth is an optional dependency, and has no types.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any

from raytrain.config.extras import extra
from raytrain.errors import StorageError
from raytrain.storage.clouds.cloud import Cloud, CloudSentences, check_endpoint
from raytrain.storage.credentials import GoogleCredentials

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

_SENTENCES = CloudSentences(
    endpoint="Google Cloud Storage",
    protocol="Google Cloud Storage",
    endpoint_variable="STORAGE_EMULATOR_HOST",
    host_variables="STORAGE_EMULATOR_HOST",
    certificates_variable="REQUESTS_CA_BUNDLE",  # which google-auth reads
    any_identity="access token",
    no_credentials=(
        "There are no Google credentials for {url}; "
        f"install {extra('gcs')} and set GOOGLE_APPLICATION_CREDENTIALS, or "
        "sign in (gcloud auth application-default login), or give the machine a service account."
    ),
    not_obtained=(
        "The Google credentials for {url} could not be obtained ({detail}); check GOOGLE_APPLICATION_CREDENTIALS, "
        "or sign in (gcloud auth application-default login)."
    ),
    refuses_credentials=(
        "{endpoint} does not accept the {identity}; check GOOGLE_APPLICATION_CREDENTIALS, or sign in again "
        "(gcloud auth application-default login)."
    ),
    no_permission=(
        "The {identity} has no permission for {url}; give its owner the role Storage Object Viewer, "
        "and to write Storage Object User."
    ),
)


@dataclass(frozen=True)
class Google(Cloud):
    """Google Cloud Storage, or an emulator of it."""

    name = "gs"
    sentences = _SENTENCES
    endpoint_url: str | None = None

    @classmethod
    def configured(cls, url: str) -> Google:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        if not emulator:
            return Google()
        endpoint_url = emulator if "://" in emulator else f"http://{emulator}"
        check_endpoint(endpoint_url, "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS")
        return Google(endpoint_url.rstrip("/"))

    def credentials(self) -> GoogleCredentials | None:
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            return GoogleCredentials("anonymous")  # an emulator needs none, and should not be shown any

        # A token of google-auth, for a service account, a sign-in with gcloud, or the machine's account. There are none
        # without google-auth, or if it finds no credentials.
        try:
            from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
            from google.auth.transport.requests import Request
        except ImportError:
            return None

        # If the user has named a file, a failure is about that file. Without one, there may simply be no credentials.
        file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        try:
            credentials = default_credentials(file)
            if not credentials.valid:  # google-auth calls a token invalid from a few minutes before its end
                credentials.refresh(Request())
        except GoogleAuthError as error:
            default_credentials.cache_clear()  # the next call finds a new file or sign-in
            if isinstance(error, DefaultCredentialsError) and not file:
                return None
            reason = str(error.args[0]).partition("\n")[0].rstrip(". ")
            raise StorageError(
                f"Google gave no access token ({reason}); check GOOGLE_APPLICATION_CREDENTIALS, or sign in again "
                "(gcloud auth application-default login)."
            ) from None
        expires_at: datetime | None = credentials.expiry and credentials.expiry.replace(tzinfo=timezone.utc)
        return GoogleCredentials(credentials.token, expires_at)

    def obstore_config(self, bucket: str) -> dict[str, Any]:
        return {"base_url": self.endpoint_url} if self.endpoint_url else {}


@cache
def default_credentials(file: str | None) -> Any:
    """Return google-auth's credentials, which keep their token. Raises GoogleAuthError if there are none.

    google-auth reads GOOGLE_APPLICATION_CREDENTIALS itself; its value ``file`` is only the key of the cache.
    """
    import google.auth

    return google.auth.default(scopes=[_SCOPE])[0]
