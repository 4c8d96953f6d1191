"""Open a store by its URL."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from raytrain.errors import UsageError
from raytrain.storage.base import S3Settings, Store
from raytrain.storage.credentials import CredentialSource, resolve


def open_store(url: str, credentials: CredentialSource | None = None, settings: S3Settings | None = None) -> Store:
    """Return the store at ``url``. Sends no request yet.

    Args:
        url: ``s3://bucket/prefix``, or the path of a folder.
        credentials: asked for credentials, and again before they expire; by default this process's AWS configuration.
        settings: endpoint and region; by default from this process's AWS configuration.

    Raises:
        UsageError: the URL is of another kind, or contains credentials.
        StorageError: the AWS configuration is broken.
    """
    if "://" not in url:
        from raytrain.storage.local import FolderStore

        return FolderStore(os.path.abspath(Path(url).expanduser()))
    check_url(url)
    # Imported here because a folder needs neither obstore nor botocore.
    from raytrain.storage.s3 import BucketStore
    from raytrain.storage.s3_settings import resolve_settings

    return BucketStore(url.rstrip("/"), settings or resolve_settings(url), credentials or resolve, uuid.uuid4().hex)


def check_url(url: str) -> None:
    """Raise UsageError unless ``url`` can be used; it is shown only if it cannot contain credentials."""
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if "?" in url or "@" in bucket or (scheme.lower() == "s3" and not re.fullmatch(r"[\w.-]*", bucket)):
        raise UsageError(
            "A URL must not contain credentials, a port or a query; write s3://bucket/prefix and set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or use a profile."
        )
    if scheme != "s3":
        raise UsageError("A URL must start with s3://; give s3://bucket/prefix or a folder.")
    if not bucket:
        raise UsageError(f"{url!r} has no bucket; write s3://bucket/prefix.")
    if "//" in rest:
        raise UsageError(f"{url!r} contains two consecutive slashes; write s3://bucket/prefix with single slashes.")
