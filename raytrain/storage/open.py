"""Open a store by its URL."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from raytrain.errors import UsageError
from raytrain.storage.base import BucketSettings, Store
from raytrain.storage.credentials import CredentialSource

_FORMS = {"s3": "s3://bucket/prefix", "gs": "gs://bucket/prefix", "az": "az://container/prefix"}
URL_FORMS = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
"""What the URL of a bucket looks like."""


def open_store(url: str, credentials: CredentialSource | None = None, settings: BucketSettings | None = None) -> Store:
    """Return the store at ``url``. Sends no request yet.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``, or the path of a folder.
        credentials: asked for credentials, and again before they expire; by default this process's own.
        settings: where the bucket is reached; by default from this process's configuration.

    Raises:
        UsageError: the URL is of another kind, or contains credentials.
        StorageError: the configuration of its cloud is broken.
    """
    if "://" not in url:
        from raytrain.storage.local import FolderStore

        return FolderStore(os.path.abspath(Path(url).expanduser()))
    check_url(url)
    # Imported here because a folder needs neither obstore nor botocore.
    from raytrain.storage.bucket import BucketStore
    from raytrain.storage.cloud import cloud_of

    cloud = cloud_of(url)
    return BucketStore(
        url.rstrip("/"), settings or cloud.settings(url), credentials or cloud.credentials, uuid.uuid4().hex
    )


def check_url(url: str) -> None:
    """Raise UsageError unless ``url`` can be used; it is shown only if it cannot contain credentials."""
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if "?" in url or "@" in bucket or (scheme.lower() in _FORMS and not re.fullmatch(r"[\w.-]*", bucket)):
        raise UsageError(
            "A URL must not contain credentials, a port or a query; write s3://bucket/prefix and set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or use a profile; or write gs://bucket/prefix and set "
            "GOOGLE_APPLICATION_CREDENTIALS; or write az://container/prefix and set AZURE_STORAGE_ACCOUNT_NAME and "
            "AZURE_STORAGE_ACCOUNT_KEY."
        )
    form = _FORMS.get(scheme)
    if form is None:
        raise UsageError(f"A URL must start with s3://, gs:// or az://; give {URL_FORMS}, or a folder.")
    if not bucket:
        raise UsageError(f"{url!r} has no bucket; write {form}.")
    if "//" in rest:
        raise UsageError(f"{url!r} contains two consecutive slashes; write {form} with single slashes.")
