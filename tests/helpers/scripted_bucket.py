"""A bucket whose server answers by a script."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import Credentials
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from tests.helpers.scripted_s3 import Request

KEYS = Credentials("AKIATESTKEY1", "secret-one")


def source(keys: Credentials | None = KEYS) -> Callable[[], Credentials | None]:
    return lambda: keys


def scripted(endpoint_url: str, keys: Callable[[], Credentials | None] | None = None) -> Store:
    return open_store("s3://bucket/prefix", keys or source(), S3(endpoint_url, "us-east-1"))


def listing(keys: list[str], request: Request) -> bytes:
    """Return S3's response to a listing of ``keys``, 60 objects or folders per page; markers of folders are empty."""
    query = dict(parse_qsl(urlsplit(request.path).query))
    prefix, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
    keys = sorted(key for key in keys if key.startswith(prefix))
    folders = {prefix + key.removeprefix(prefix).partition("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]}
    folders = folders if "delimiter" in query else set[str]()
    objects = {key for key in keys if not folders or "/" not in key[len(prefix) :]}
    names = sorted(name for name in objects | folders if name > after)
    time = "<LastModified>2024-01-01T00:00:00.000Z</LastModified>"
    more = len(names) > 60
    return (
        f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>"
        + (f"<NextContinuationToken>{names[59]}</NextContinuationToken>" if more else "")
        + "".join(
            f"<Contents><Key>{name}</Key>{time}<Size>{int(not name.endswith('/'))}</Size></Contents>"
            for name in names[:60]
            if name in objects
        )
        + "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in names[:60] if name in folders)
        + "</ListBucketResult>"
    ).encode()
