"""Conditional writes: an object of a bucket is written only if nobody else has made or changed it meanwhile."""

# obstore's types refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import AlreadyExistsError, PreconditionError

from raytrain.storage.request_errors import http_status, names_no_bucket

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion

    from raytrain.storage.bucket_client import ObjectStore

T = TypeVar("T")

# Servers that keep objects as files, such as rclone's and s3proxy's, may miss an object while it is replaced.
REPLACED_WITHIN_S, _LOOK_EVERY_S = 2.0, 0.1
_NOT_IMPLEMENTED = 501


def current_version(client: ObjectStore, path: str) -> UpdateVersion | None:
    """Return the version of an object; None if there is none."""
    meta = if_found(lambda: client.head(path))
    return meta and version_of(meta)


def if_found(ask: Callable[[], T], within_s: float = 0.0) -> T | None:
    """Return the result of ``ask``; None if the object does not exist, nor appears within ``within_s`` seconds.

    Raises FileNotFoundError if there is no bucket, and any other error of ``ask``.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return ask()
        except FileNotFoundError as error:
            if names_no_bucket(error):
                raise
            if time.monotonic() >= deadline:
                return None
        time.sleep(_LOOK_EVERY_S)


def version_of(meta: ObjectMeta) -> UpdateVersion:
    """Return what identifies this version of an object: its ETag, and in Google's cloud its generation."""
    version: UpdateVersion = {"e_tag": meta["e_tag"]}
    if (generation := meta["version"]) is not None:
        version["version"] = generation
    return version


def put_unless_changed(client: ObjectStore, path: str, data: bytes, version: UpdateVersion | None) -> bool:
    """Write an object if it still has ``version``, or, if that is None, only if there is no object yet.

    Return True if it was written. A server without conditional writes writes it in any case.
    """
    try:
        client.put(path, data, mode=version or "create")
    except (AlreadyExistsError, PreconditionError):
        return False
    except Exception as error:
        if http_status(error) != _NOT_IMPLEMENTED:
            raise
        client.put(path, data)
    return True
