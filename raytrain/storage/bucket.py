"""Storage below a prefix of a bucket, in any cloud: its objects read, written and listed.

Each method sends its requests through ``BucketStore._send``, which retries them, renews credentials that are refused,
and makes one sentence of what went wrong.
"""

# obstore's types refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import AlreadyExistsError, GenericError, InvalidPathError, PreconditionError

from raytrain.errors import OwnerChanged, StorageError
from raytrain.storage.bucket_client import FEWEST_PARTS, BucketClient, BucketConnection, bucket_and_root, read_timeout_s
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import LentCredentials
from raytrain.storage.disk_cache import DiskCache
from raytrain.storage.request_errors import explain, http_status, is_transient, names_no_bucket, refuses_credentials
from raytrain.storage.retries_and_hedges import DEFAULT, FAIL_FAST, RetryPolicy, request_threads, with_retries
from raytrain.storage.store import Guard, ObjectChanged, Store, StoredObject, shown_url

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta, UpdateVersion

    from raytrain.storage.bucket_client import ObjectStore

T = TypeVar("T")

_log = logging.getLogger("raytrain")

_PART_BYTES = 5 << 20  # larger objects are uploaded in parts, several at a time
_MAX_ROOM_BYTES = 12 * _PART_BYTES  # of all uploads of this process that are sent at a time
_QUICK_FRACTION = 0.1  # of a request's limit: uploads that take less may be more at a time
_DOCUMENT_BYTES = 16 << 20  # an owner writes objects up to this size conditionally, in one request
_BRIEF_BYTES = 1 << 20  # an owner has a short limit for objects smaller than this
_OWNERS_REQUEST_S = 15.0  # that limit, half a lease: after a whole one, another process may be the owner
_MAX_CHANGES = 20  # times that others may change an object while its owner tries to write it
_UNUSABLE_NAME = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")  # no file could have it: a//b, a/../b
# Servers that keep objects as files, such as rclone's and s3proxy's, may miss an object while it is replaced.
_REPLACED_WITHIN_S, _LOOK_EVERY_S = 2.0, 0.1
_NOT_IMPLEMENTED = 501
_LAST = "\U0010ffff"  # the last character of Unicode: as a name, it sorts after all others of a folder

_LEADING_SLASH = "An object of {} has a name that begins with a slash, which cannot be used; rename it."


_cached_client = lru_cache(maxsize=32)(BucketClient)
_client_lock = threading.Lock()  # the cache alone would let concurrent threads create a client each


class _Sending:
    """The uploads of this process: as many bytes at a time as the line carries within a tenth of a request's limit.

    The time in which a request is sent counts towards its limit. So if many share a slow line, none would be over in
    time, and all would be sent again, for ever. Uploads begin with ``_PART_BYTES`` in all, which doubles while they are
    quick, as TCP does, since over a fast line to a server far away each waits for its answer most of the time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._room_bytes = _PART_BYTES
        self._sent_bytes = 0  # of all uploads in progress

    @contextmanager
    def room_for(self, num_bytes: int) -> Generator[int]:
        """Wait until an object of ``num_bytes`` may be sent, alone if it is larger than the room.

        Yield how many of its parts may be sent at a time.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._sent_bytes or self._sent_bytes + num_bytes <= self._room_bytes)
            self._sent_bytes += num_bytes
            num_parts = max(FEWEST_PARTS, self._room_bytes // _PART_BYTES)
        began, is_quick = time.monotonic(), False
        try:
            yield num_parts
            # Of a large object, it is the time of the parts that are sent together.
            seconds = (time.monotonic() - began) * min(1.0, num_parts * _PART_BYTES / max(1, num_bytes))
            is_quick = seconds < _QUICK_FRACTION * read_timeout_s()
        finally:
            with self._changed:
                if not is_quick:
                    self._room_bytes = _PART_BYTES
                elif 2 * self._sent_bytes > self._room_bytes:  # otherwise a slow line may be quick, too
                    self._room_bytes = min(self._room_bytes + num_bytes, _MAX_ROOM_BYTES)
                self._sent_bytes -= num_bytes
                self._changed.notify_all()


_sending = _Sending()


class UnusableNames(StorageError):
    """An object's name, or one in a listing, cannot be used."""


@dataclass(frozen=True)
class BucketStore(BucketConnection, Store):  # pyright: ignore[reportIncompatibleVariableOverride] ; it has a cloud
    """See :class:`Store`. ``url`` is ``s3://bucket/prefix``, for example."""

    retry_policy: RetryPolicy = field(default=DEFAULT, compare=False)
    guard: Guard | None = field(default=None, compare=False)
    disk: DiskCache | None = field(default=None, compare=False)  # keeps what was read

    # Reading. A fetch passes get, _send and with_retries on its way to obstore.

    def get(self, path: str, etag: str = "") -> bytes:
        def request(client: ObjectStore) -> tuple[str | None, bytes]:
            result = client.get(path)
            return result.meta["e_tag"], bytes(result.bytes())  # read here, so that a body that breaks off is retried

        def fetch() -> bytes:
            received_etag, content = self._send(path, request)
            if etag and received_etag and _normalized(received_etag) != _normalized(etag):
                raise ObjectChanged(f"{self.url}/{path}")
            return content

        if self.disk is None:
            return fetch()
        # The name of the entry says which content of which object it is, on which server.
        return self.disk.get("\0".join([self.cloud.endpoint_url or "", self.url, path, _normalized(etag)]), fetch)

    def _send(self, path: str, operation: Callable[[ObjectStore], T]) -> T:
        """Call ``operation`` with retries, and once more with new credentials if these are refused."""
        client = self._client()
        with self._explained(path, client):
            obstore = client.obstore
            try:
                return with_retries(partial(operation, obstore), self.retry_policy, is_transient)
            except Exception as error:
                if not refuses_credentials(error):
                    raise
            renewed = client.renewed(obstore)
            return with_retries(partial(operation, renewed), self.retry_policy, is_transient)

    @contextmanager
    def _explained(self, path: str, client: BucketClient) -> Generator[None]:
        """Raise every error as a StorageError, or as FileNotFoundError if there is no object ``path``.

        OwnerChanged is raised as it is. An object's name that obstore refuses is an UnusableNames.
        """
        url = shown_url(f"{self.url}/{path}")
        try:
            yield
        except OwnerChanged:  # says itself whose the store is
            raise
        except BaseException as error:
            # A mistake in obstore raises PanicException, which is no Exception, so that threads would end without a
            # word. Whatever else is none, such as KeyboardInterrupt, is not about storage.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if isinstance(error, FileNotFoundError) and not names_no_bucket(error):
                raise FileNotFoundError(url) from None
            credentials = client.credentials
            # If the source of the credentials cannot read a file, the error is not about the bucket.
            if isinstance(failure := credentials.failure, OSError):
                detail = ": ".join(filter(None, (failure.filename, failure.strerror or str(failure))))
                raise StorageError(self.cloud.sentences.not_obtained.format(url=url, detail=detail)) from error
            sentence = explain(failure or error, url, self.cloud, credentials.identity)
            raise (UnusableNames(str(sentence)) if isinstance(error, InvalidPathError) else sentence) from error

    def _client(self) -> BucketClient:
        """Return this process's client, made at the first call, which stores with equal connections share.

        Such stores may still differ in guard, disk and retries. Raises StorageError if the file with certificates that
        the environment names cannot be read.
        """
        with _client_lock:
            return _cached_client(self)

    def get_range(self, path: str, start: int, num_bytes: int) -> bytes:
        def request(client: ObjectStore) -> bytes:
            size_bytes = client.head(path)["size"]  # S3 refuses a range behind the end
            if start >= size_bytes:
                return b""
            try:
                return bytes(client.get_range(path, start=start, end=min(start + num_bytes, size_bytes)))
            except GenericError:  # rclone's server says that it sends the whole object, which obstore refuses
                return bytes(client.get(path).bytes())[start : start + num_bytes]

        return self._send(path, request)

    def exists(self, path: str) -> bool:
        return self._send(path, lambda client: _current_version(client, path)) is not None

    def check_readable(self) -> None:
        with suppress(UnusableNames):  # the server has answered, which is all that is asked here
            self.fail_fast()._send("", lambda client: next(iter(client.list()), None))
        self._client().check_pages()

    # Writing and deleting, by anybody or by the owner alone.

    def put(self, path: str, data: bytes) -> None:
        # Without an owner, anybody may replace the object. A large object of an owner has a name of its own.
        if self.guard is None or len(data) > _DOCUMENT_BYTES:
            self._upload(path, data, multipart=len(data) > _PART_BYTES)
            return

        def put_as_owner(client: ObjectStore) -> None:
            # Get the version before the check: if another process becomes the owner after it and writes the object, the
            # version has changed, and the write is refused.
            for _ in range(_MAX_CHANGES):
                version = _current_version(client, path)
                self._check_owner(client)
                if _put_unless_changed(client, path, data, version):
                    return
            raise ObjectChanged(f"{self.url}/{path}")

        self._within_lease(len(data))._send(path, put_as_owner)

    def put_file(self, path: str, file: Path) -> None:
        self._upload(path, file, multipart=True)

    def _upload(self, path: str, content: bytes | Path, multipart: bool) -> None:
        """Write or replace an object, whoever has written it; with ``multipart``, several parts are sent at a time."""
        num_bytes = content.stat().st_size if isinstance(content, Path) else len(content)

        def request(client: ObjectStore) -> None:
            with _sending.room_for(num_bytes) as num_parts:
                self._check_owner(client)  # only now: the owner may have changed while this waited for room
                try:
                    client.put(path, content, chunk_size=_PART_BYTES, max_concurrency=num_parts)
                except Exception as error:
                    if not is_transient(error):
                        self._check_owner(client)  # perhaps another owner has aborted this upload
                    raise

        dataclasses.replace(self, multipart=multipart)._send(path, request)

    def put_if(self, path: str, data: bytes, expected: bytes | None) -> None:
        def write_if_expected(client: ObjectStore) -> bool:
            """Write ``data`` in place of ``expected``, and return whether the object holds ``data`` now."""
            # An object that should exist may be missed while somebody replaces it: look again for a while.
            stored = _if_found(lambda: client.get(path), 0.0 if expected is None else _REPLACED_WITHIN_S)
            version, content = (_version_of(stored.meta), bytes(stored.bytes())) if stored else (None, None)
            self._check_owner(client)
            return content == data or (content == expected and _put_unless_changed(client, path, data, version))

        if not self._send(path, write_if_expected):
            raise ObjectChanged(f"{self.url}/{path}")

    def has_conditional_puts(self) -> bool:
        # A server with conditional writes refuses to create an object that exists.
        name = f".condition-check-{uuid.uuid4().hex}"
        self.put(name, b"")
        try:
            return not self._send(name, lambda client: _put_unless_changed(client, name, b"", None))
        finally:
            self.delete(name)

    def delete(self, path: str) -> None:
        def request(client: ObjectStore) -> None:
            self._check_owner(client)
            client.delete(path)

        with suppress(FileNotFoundError):
            self._within_lease()._send(path, request)

    def abort_uploads(self, should_abort: Callable[[str], bool], idle_s: float) -> None:
        if not isinstance(self.cloud, S3):
            return
        bucket, root = bucket_and_root(self.url)
        with suppress(StorageError), self._explained("", self._client()):
            keys = self._client().s3_keys()
            self.cloud.abort_uploads(bucket, root, keys, lambda name: should_abort(name.removeprefix(root)))

    def _check_owner(self, client: ObjectStore) -> None:
        """Raise OwnerChanged if the store has a guard, and its object names another owner."""
        if self.guard is None:
            return
        path = self.guard.path
        self.guard.check(_if_found(lambda: bytes(client.get(path).bytes()), _REPLACED_WITHIN_S), self.url)

    def _within_lease(self, num_bytes: int = 0) -> BucketStore:
        """Return the store with a short limit for deletions and for writes of few bytes, if it has an owner.

        A request that takes longer than the owner's lease could arrive after another process has become the owner. A
        larger document, which is sent whole, gets the time in which a slow line carries the parts of an upload.
        """
        if self.guard is None:
            return self
        is_brief = num_bytes < _BRIEF_BYTES
        return dataclasses.replace(self, request_s=_OWNERS_REQUEST_S if is_brief else FEWEST_PARTS * read_timeout_s())

    # Listing.

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        prefix = prefix.strip("/")
        unusable_names: list[str] = []
        self._client().check_pages()

        # Go down to where the tree of folders branches, so that several of them can be listed at once.
        folders = [prefix]
        objects: list[ObjectMeta] = []  # on the way there
        while len(folders) == 1:
            objects_of_level, folders = self._list_level(folders[0], unusable_names)
            objects += objects_of_level

        # Yield these, then each of the branches with all that is below it.
        branches = request_threads().map(self._list_folder, folders, repeat(unusable_names))
        for listed_objects in (objects, *branches):
            for meta in listed_objects:
                if meta["path"] != prefix:  # consoles create an empty object as a marker for the folder itself
                    yield StoredObject(meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"])
        if unusable_names:
            _log.warning(
                "%s objects below %s are left out, because their names cannot be used, such as %r; rename them.",
                f"{len(unusable_names):,}",
                f"{self.url}/{prefix}".rstrip("/"),
                unusable_names[0],
            )

    def _list_level(self, folder: str, unusable_names: list[str]) -> tuple[Sequence[ObjectMeta], list[str]]:
        """Return the objects that lie directly in ``folder``, and the folders in it, which are to be listed next.

        If the server breaks this listing off, or obstore refuses a name in it, return all objects below ``folder``, and
        no folders. Names that cannot be used are added to ``unusable_names``.
        """
        try:
            listed = self._send(folder, lambda client: client.list_with_delimiter(folder))
            if self._ask_whether_more_follow(folder, listed):
                return self._list_folder(folder, unusable_names), []
        except UnusableNames as error:
            return self._list_any_names(folder and f"{folder}/", unusable_names, error), []

        # obstore drops a slash at the beginning of a name. Such names seem to be in a folder without a name, which
        # would be listed as the bucket itself again.
        objects, folders = list(listed["objects"]), list(listed["common_prefixes"])
        if "" in folders:
            folders.remove("")
            objects += self._list_any_names("/", unusable_names, UnusableNames(_LEADING_SLASH.format(self.url)))
        return objects, folders

    def _list_folder(self, folder: str, unusable_names: list[str]) -> Sequence[ObjectMeta]:
        """Return all objects below ``folder``, and add names that cannot be used to ``unusable_names``."""
        objects: list[ObjectMeta] = []

        def list_rest(client: ObjectStore) -> None:
            # A retry goes on after the last name that has come. Later pages may also lack the token of the next one, so
            # a listing of more than one page has ended only when the server has no names after the last one.
            while True:
                num_before = len(objects)
                last_name = objects[-1]["path"] if objects else None
                for page in client.list(folder, offset=last_name):
                    objects.extend(meta for meta in page if last_name is None or meta["path"] > last_name)
                if num_before == len(objects) or not self._client().may_fill_a_page(len(objects)):
                    return

        try:
            self._send(folder, list_rest)
        except UnusableNames as error:
            return self._list_any_names(folder and f"{folder}/", unusable_names, error)
        return objects

    def _ask_whether_more_follow(self, folder: str, listed: ListResult[Sequence[ObjectMeta]]) -> bool:
        """Ask the server for names in ``folder`` after those that it has ``listed``; return True if there are some.

        A server that breaks off a listing does not say so, and obstore takes what has come for all of it. Nothing is
        asked, and False returned, if fewer names have come than fill a page.
        """
        # After a folder in the listing comes all that is in it, so go on behind the last name that it can have.
        names = [f"{name}/{_LAST}" for name in listed["common_prefixes"]] + [meta["path"] for meta in listed["objects"]]
        if not self._client().may_fill_a_page(len(names)):
            return False
        last_name = max(names)
        next_page = self._send(folder, lambda client: next(iter(client.list(folder, offset=last_name)), None))
        return next_page is not None

    def _list_any_names(self, start: str, unusable_names: list[str], error: UnusableNames) -> Sequence[ObjectMeta]:
        """Return objects whose names begin with ``start``, by boto3, which returns names that obstore refuses.

        Names that cannot be used are left out, and added to ``unusable_names``. In other clouds than S3, raises
        ``error``, with which obstore has refused them.
        """
        if not isinstance(self.cloud, S3):
            raise error
        bucket, root = bucket_and_root(self.url)
        usable: list[ObjectMeta] = []
        with self._explained(start.rstrip("/"), self._client()):
            for meta in self.cloud.list_any_names(bucket, root + start, self._client().s3_keys()):
                name = meta["path"].removeprefix(root).removesuffix("/")
                if not name and not meta["size"]:  # the marker of the store's own folder, or one called "/"
                    continue
                if _UNUSABLE_NAME.search(name):
                    unusable_names.append(name or "/")
                else:
                    usable.append({**meta, "path": name})
        return usable

    # The same store with another owner, cache, credentials or patience.

    def guarded(self, guard: Guard) -> BucketStore:
        return dataclasses.replace(self, guard=guard)

    def kept_on(self, disk: DiskCache | None) -> BucketStore:
        return dataclasses.replace(self, disk=disk)

    def with_lent_credentials(self, lent: LentCredentials) -> BucketStore:
        source = self.cloud.credentials_from(lent)
        return dataclasses.replace(self, credentials=source, connection_id=uuid.uuid4().hex)

    def fail_fast(self) -> BucketStore:
        return dataclasses.replace(self, retry_policy=FAIL_FAST)


def _normalized(etag: str) -> str:
    """Return an ETag without quotes and ``W/``, which servers add in some answers and not in others."""
    return etag.removeprefix("W/").strip('"')


# Conditional writes: an object is written only if nobody else has made or changed it meanwhile.


def _current_version(client: ObjectStore, path: str) -> UpdateVersion | None:
    """Return the version of an object; None if there is none."""
    meta = _if_found(lambda: client.head(path))
    return meta and _version_of(meta)


def _if_found(ask: Callable[[], T], within_s: float = 0.0) -> T | None:
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


def _version_of(meta: ObjectMeta) -> UpdateVersion:
    """Return what identifies this version of an object: its ETag, and in Google's cloud its generation."""
    version: UpdateVersion = {"e_tag": meta["e_tag"]}
    if (generation := meta["version"]) is not None:
        version["version"] = generation
    return version


def _put_unless_changed(client: ObjectStore, path: str, data: bytes, version: UpdateVersion | None) -> bool:
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
