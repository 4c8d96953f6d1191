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
    """Return S3's response to a listing of ``keys``, 60 per page; markers of folders are empty."""
    query = dict(parse_qsl(urlsplit(request.path).query))
    prefix, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
    rests = [key.removeprefix(prefix) for key in sorted(keys) if key.startswith(prefix) and key > after]
    folders = sorted({rest.partition("/")[0] for rest in rests if "/" in rest} if "delimiter" in query else [])
    objects = [prefix + rest for rest in rests if not folders or "/" not in rest]
    time = "<LastModified>2024-01-01T00:00:00.000Z</LastModified>"
    more = len(objects) > 60
    return (
        f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>"
        + (f"<NextContinuationToken>{objects[59]}</NextContinuationToken>" if more else "")
        + "".join(
            f"<Contents><Key>{key}</Key>{time}<Size>{int(not key.endswith('/'))}</Size></Contents>"
            for key in objects[:60]
        )
        + "".join(f"<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>" for folder in folders)
        + "</ListBucketResult>"
    ).encode()
