"""Storage below a prefix of a bucket, in any cloud: objects, their conditional writes, and their listings."""

# obstore's types refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError

from raytrain.storage.bucket_client import DEFAULT, FAIL_FAST, BucketClient, RetryPolicy, UnusableNames, bucket_and_root
from raytrain.storage.clouds.cloud import Cloud
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import Credentials, CredentialSource, LentCredentials, required
from raytrain.storage.disk_cache import DiskCache
from raytrain.storage.hedged_requests import threads
from raytrain.storage.request_errors import http_status, names_no_bucket
from raytrain.storage.store import Guard, ObjectChanged, Store, StoredObject

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta, UpdateVersion

    from raytrain.storage.bucket_client import ObjectStore

T = TypeVar("T")

_log = logging.getLogger("raytrain")

_PART_BYTES = 5 << 20  # larger objects are uploaded in parts, several at a time
_DOCUMENT_BYTES = 16 << 20  # an owner writes as much in one request, if nobody else has written meanwhile
_OWNERS_REQUEST_S = 15.0  # half a lease: after that, another process may be the owner
_MAX_CHANGES = 20
_NOT_IMPLEMENTED = 501
_UNUSABLE_NAME = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")  # no file could have it: a//b, a/../b


@dataclass(frozen=True)
class BucketStore(Store):
    """See :class:`Store`. ``url`` is ``s3://bucket/prefix``, for example."""

    url: str
    cloud: Cloud  # pyright: ignore[reportIncompatibleVariableOverride] ; never None for a bucket
    credentials: CredentialSource = field(compare=False, repr=False)
    connection_id: str = field(repr=False)
    """Distinguishes stores with different credentials, in every process that a store is sent to."""
    retry_policy: RetryPolicy = DEFAULT
    multipart: bool = False  # upload in parts, each of which obstore retries
    request_s: float | None = None  # most that a request may take; None: half an hour
    guard: Guard | None = field(default=None, compare=False)
    disk: DiskCache | None = field(default=None, compare=False)
    """Keeps what was read. Stores that differ in it share their connections."""

    def get(self, path: str, etag: str = "") -> bytes:
        if self.disk is None:
            return self._fetch(path, etag)
        name = "\0".join([self.cloud.endpoint_url or "", self.url, path, _normalized(etag)])
        return self.disk.get(name, lambda: self._fetch(path, etag))

    def _fetch(self, path: str, etag: str) -> bytes:
        found, data = self._call(path, lambda client: _etag_and_content(client.get(path)))
        if etag and found and _normalized(found) != _normalized(etag):
            raise ObjectChanged(f"{self.url}/{path}")
        return data

    def get_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self._call(path, lambda client: _part(client, path, start, num_bytes))

    def put(self, path: str, data: bytes) -> None:
        if self.guard is not None and len(data) <= _DOCUMENT_BYTES:
            self._owners_store(len(data))._call(path, lambda client: self._put_as_owner(client, path, data))
        else:
            self._upload(path, data, multipart=len(data) > _PART_BYTES)

    def put_file(self, path: str, file: Path) -> None:
        self._upload(path, file, multipart=True)

    def _upload(self, path: str, content: bytes | Path, multipart: bool) -> None:
        def put(client: ObjectStore) -> None:
            self._check_owner(client)
            client.put(path, content, chunk_size=_PART_BYTES)

        dataclasses.replace(self, multipart=multipart)._call(path, put)

    def _put_as_owner(self, client: ObjectStore, path: str, data: bytes) -> None:
        """Write an object; whoever becomes the owner after the check, and writes it, is not overwritten."""
        for _ in range(_MAX_CHANGES):
            version = _version_now(client, path)  # before the check
            self._check_owner(client)
            if _put_unless_changed(client, path, data, version):
                return
        raise ObjectChanged(f"{self.url}/{path}")

    def _check_owner(self, client: ObjectStore) -> None:
        if self.guard is None:
            return
        path = self.guard.path
        self.guard.check(_if_found(lambda: bytes(client.get(path).bytes())), self.url)

    def _owners_store(self, num_bytes: int = 0) -> BucketStore:
        """The store for a small write or a deletion, which is not to arrive when the lease is over."""
        brief = self.guard is not None and num_bytes < _PART_BYTES // 5
        return dataclasses.replace(self, request_s=_OWNERS_REQUEST_S) if brief else self

    def put_if(self, path: str, data: bytes, expected: bytes | None) -> None:
        if not self._call(path, lambda client: self._put_if(client, path, data, expected)):
            raise ObjectChanged(f"{self.url}/{path}")

    def _put_if(self, client: ObjectStore, path: str, data: bytes, expected: bytes | None) -> bool:
        """Write an object if its content is ``expected``; whether it holds ``data`` now."""
        got = _if_found(lambda: client.get(path))
        version, found = (_version(got.meta), bytes(got.bytes())) if got else (None, None)
        self._check_owner(client)
        return found == data or (found == expected and _put_unless_changed(client, path, data, version))

    def has_conditional_puts(self) -> bool:
        name = f".condition-check-{uuid.uuid4().hex}"
        self.put(name, b"")
        try:
            return not self._call(name, lambda client: _put_unless_changed(client, name, b"", None))
        finally:
            self.delete(name)

    def delete(self, path: str) -> None:
        def delete(client: ObjectStore) -> None:
            self._check_owner(client)
            client.delete(path)

        with suppress(FileNotFoundError):
            self._owners_store()._call(path, delete)

    def exists(self, path: str) -> bool:
        return self._call(path, lambda client: _version_now(client, path)) is not None

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        prefix = prefix.strip("/")
        unusable: list[str] = []
        folders, objects = self._split(prefix, unusable)
        for listed in (objects, *threads().map(self._list_folder, folders, repeat(unusable))):
            # Consoles create an empty object as a marker for the folder itself.
            yield from (_stored(found) for found in listed if found["path"] != prefix)
        if unusable:
            _log.warning(
                "%s objects below %s are left out, because their names cannot be used, such as %r; rename them.",
                f"{len(unusable):,}",
                f"{self.url}/{prefix}".rstrip("/"),
                unusable[0],
            )

    def guarded(self, guard: Guard) -> BucketStore:
        return dataclasses.replace(self, guard=guard)

    def kept_on(self, disk: DiskCache | None) -> BucketStore:
        return dataclasses.replace(self, disk=disk)

    def with_lent_credentials(self, lent: LentCredentials) -> BucketStore:
        source = self.cloud.credentials_from(lent)
        return dataclasses.replace(self, credentials=source, connection_id=uuid.uuid4().hex)

    def fail_fast(self) -> BucketStore:
        return dataclasses.replace(self, retry_policy=FAIL_FAST)

    def remove_if_empty(self) -> None: ...

    def check_readable(self) -> None:
        with suppress(UnusableNames):
            self.fail_fast()._call("", lambda client: next(iter(client.list()), None))

    def _split(self, prefix: str, unusable: list[str]) -> tuple[list[str], list[ObjectMeta]]:
        """Return subfolders that can be listed concurrently, and the objects above them."""
        folders, objects = [prefix], []
        while len(folders) == 1:
            (folder,) = folders
            try:
                listed = self._call(folder, lambda client, folder=folder: client.list_with_delimiter(folder))
            except UnusableNames as error:
                return [], [*objects, *self._list_any_names(folder, unusable, error)]
            folders = list(listed["common_prefixes"])
            objects += listed["objects"]
        return folders, objects

    def _list_folder(self, folder: str, unusable: list[str]) -> Sequence[ObjectMeta]:
        objects: list[ObjectMeta] = []

        def resume(client: ObjectStore) -> None:
            for page in client.list(folder, offset=objects[-1]["path"] if objects else None):
                objects.extend(page)

        try:
            self._call(folder, resume)
        except UnusableNames as error:
            return self._list_any_names(folder, unusable, error)
        return objects

    def _list_any_names(self, folder: str, unusable: list[str], error: UnusableNames) -> Sequence[ObjectMeta]:
        """List objects whatever their names are, unusable ones in ``unusable``; outside S3 raises ``error``."""
        if not isinstance(self.cloud, S3):
            raise error
        bucket, root = bucket_and_root(self.url)
        usable: list[ObjectMeta] = []
        with _client(self).explained(folder):
            keys = None if self.cloud.unsigned else required(self.credentials())
            assert keys is None or isinstance(keys, Credentials)
            for found in self.cloud.list_any_names(bucket, f"{root}{folder}/" if folder else root, keys):
                name = found["path"].removeprefix(root).removesuffix("/")
                if _UNUSABLE_NAME.search(name):
                    unusable.append(name)
                elif name:  # as opposed to the marker of the store's own folder
                    usable.append({**found, "path": name})
        return usable

    def _call(self, path: str, operation: Callable[[ObjectStore], T]) -> T:
        return _client(self).call(path, operation, self.retry_policy)


def _client(store: BucketStore) -> BucketClient:
    """Return this process's client for ``store`` and all its copies."""
    with _client_lock:
        return _cached_client(store)


_cached_client = lru_cache(maxsize=32)(BucketClient)
_client_lock = threading.Lock()  # the cache alone would let concurrent threads create a client each


def _etag_and_content(result: GetResult) -> tuple[str | None, bytes]:
    return result.meta["e_tag"], bytes(result.bytes())


def _part(client: ObjectStore, path: str, start: int, num_bytes: int) -> bytes:
    size_bytes = client.head(path)["size"]  # S3 refuses a range behind the end
    if start >= size_bytes:
        return b""
    try:
        return bytes(client.get_range(path, start=start, end=min(start + num_bytes, size_bytes)))
    except GenericError:  # rclone's server says that it sends the whole object, which obstore refuses
        return bytes(client.get(path).bytes())[start : start + num_bytes]


def _version_now(client: ObjectStore, path: str) -> UpdateVersion | None:
    """The version of an object; None if there is none."""
    meta = _if_found(lambda: client.head(path))
    return meta and _version(meta)


def _if_found(ask: Callable[[], T]) -> T | None:
    """What ``ask`` returns; None if there is no such object. Raises FileNotFoundError if there is no bucket."""
    try:
        return ask()
    except FileNotFoundError as error:
        if names_no_bucket(error):
            raise
        return None


def _version(meta: ObjectMeta) -> UpdateVersion:
    """What tells an object from one that replaced it: its ETag, and in Google's cloud its generation."""
    version: UpdateVersion = {"e_tag": meta["e_tag"]}
    if (generation := meta["version"]) is not None:
        version["version"] = generation
    return version


def _put_unless_changed(client: ObjectStore, path: str, data: bytes, version: UpdateVersion | None) -> bool:
    """Write an object that is still of this version, or that does not exist; whether the server did so."""
    try:
        client.put(path, data, mode=version or "create")
    except (AlreadyExistsError, PreconditionError):
        return False
    except Exception as error:
        if http_status(error) != _NOT_IMPLEMENTED:
            raise
        client.put(path, data)  # the server knows no conditions
    return True


def _normalized(etag: str) -> str:
    """Remove what servers add around an ETag in some answers and not in others."""
    return etag.removeprefix("W/").strip('"')


def _stored(found: ObjectMeta) -> StoredObject:
    return StoredObject(found["path"], found["size"], found["e_tag"] or "", found["last_modified"])
