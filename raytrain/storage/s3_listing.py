"""Lists a folder in S3 that contains names which cannot be used: obstore returns nothing of it, botocore everything."""

# botocore has no types, and obstore's refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from raytrain.storage.base import S3Settings
from raytrain.storage.bucket_client import bucket_and_root
from raytrain.storage.credentials import Credentials

if TYPE_CHECKING:
    from obstore import ObjectMeta

_UNUSABLE_NAME = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")  # no file could have it: a//b, a/../b


class AnyNames(NamedTuple):
    """A listing of objects with any names."""

    usable: list[ObjectMeta]
    unusable: list[str]
    """Names of the other objects."""


def list_any_names(url: str, settings: S3Settings, credentials: Credentials, folder: str) -> AnyNames:
    """List all objects below ``folder``, which is relative to ``url``, with botocore; raises botocore's exceptions."""
    bucket, root = bucket_and_root(url)
    prefix = f"{root}{folder}/" if folder else root
    found: list[ObjectMeta] = []
    for page in _client(settings, credentials).get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        found += [_object_meta(entry, root) for entry in page.get("Contents", [])]
    named = [each for each in found if each["path"]]  # without the marker of the store's own folder
    return AnyNames(
        usable=[each for each in named if not _UNUSABLE_NAME.search(each["path"])],
        unusable=[each["path"] for each in named if _UNUSABLE_NAME.search(each["path"])],
    )


def _client(settings: S3Settings, credentials: Credentials) -> Any:
    import botocore.session  # pyright: ignore[reportMissingTypeStubs]
    from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]

    return botocore.session.Session().create_client(
        "s3",
        region_name=settings.region or "us-east-1",
        endpoint_url=settings.endpoint_url,
        aws_access_key_id=credentials.access_key_id,
        aws_secret_access_key=credentials.secret_access_key,
        aws_session_token=credentials.session_token,
        config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard", "max_attempts": 5}),
    )


def _object_meta(entry: dict[str, Any], root: str) -> ObjectMeta:
    return {
        "path": entry["Key"].removeprefix(root).removesuffix("/"),
        "size": entry["Size"],
        "e_tag": entry.get("ETag"),
        "last_modified": entry["LastModified"],
        "version": None,
    }
