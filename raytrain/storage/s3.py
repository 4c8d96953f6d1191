"""Storage under an S3 prefix: obstore sends the requests, botocore resolves endpoint, region and credentials."""

# botocore has no types, and obstore's refer to arro3, which is not installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import logging
import os
import re
import ssl
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.exceptions import AlreadyExistsError, InvalidPathError, PreconditionError
from obstore.store import S3Store

from raytrain.errors import StorageError, UsageError
from raytrain.storage.base import ObjectChanged, S3Settings, Store, StoredObject, threads
from raytrain.storage.credentials import Credentials, CredentialSource
from raytrain.storage.error_sentences import explain
from raytrain.storage.retry import DEFAULT, FAIL_FAST, INITIAL_WAIT_S, MAX_WAIT_S, RetryPolicy, with_retries
from raytrain.storage.s3_errors import http_status, refuses_credentials, s3_error_code

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

T = TypeVar("T")

_log = logging.getLogger("raytrain")

_RENEW_BEFORE_EXPIRY = timedelta(minutes=5)
_CLIENT: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(minutes=30),  # of a whole transfer: a checkpoint may take long, as long as bytes arrive
}
_PART_BYTES = 5 << 20  # larger objects are uploaded in parts, several at a time
# obstore retries each part of an upload; all other requests are retried, and counted, by with_retries.
_RETRY_PARTS: RetryConfig = {
    "max_retries": DEFAULT.max_retries,
    "retry_timeout": timedelta(seconds=DEFAULT.max_duration_s),
    "backoff": {
        "init_backoff": timedelta(seconds=INITIAL_WAIT_S),
        "max_backoff": timedelta(seconds=MAX_WAIT_S),
        "base": 2,
    },
}
_UNUSABLE_NAME = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")  # no file could have it: a//b, a/../b
_NOT_IMPLEMENTED = 501
_NO_RETRIES: RetryConfig = {**_RETRY_PARTS, "max_retries": 0}


@dataclass(frozen=True)
class BucketStore(Store):
    """See :class:`Store`. ``url`` is ``s3://bucket/prefix``."""

    url: str
    settings: S3Settings  # pyright: ignore[reportIncompatibleVariableOverride] ; never None for S3
    credentials: CredentialSource = field(compare=False, repr=False)
    connection_id: str = field(repr=False)
    """Distinguishes stores with different credentials, in every process that a store is sent to."""
    retry_policy: RetryPolicy = DEFAULT
    multipart: bool = False
    """Upload in parts, each of which obstore retries."""

    def get(self, path: str, etag: str = "") -> bytes:
        found, data = self._call(path, lambda client: _content(client.get(path)))
        if etag and found and _normalized(found) != _normalized(etag):
            raise ObjectChanged(f"{self.url}/{path}")
        return data

    def put(self, path: str, data: bytes) -> None:
        store = dataclasses.replace(self, multipart=True) if len(data) > _PART_BYTES else self
        store._call(path, lambda client: client.put(path, data, chunk_size=_PART_BYTES))

    def put_if(self, path: str, data: bytes, expected: bytes | None) -> None:
        if not self._call(path, lambda client: _put_if(client, path, data, expected)):
            raise ObjectChanged(f"{self.url}/{path}")

    def has_conditional_puts(self) -> bool:
        name = f".condition-check-{uuid.uuid4().hex}"
        self.put(name, b"")
        try:
            return not self._call(name, lambda client: _put_unless_changed(client, name, b"", None))
        finally:
            self.delete(name)

    def delete(self, path: str) -> None:
        self._call(path, lambda client: client.delete(path))

    def exists(self, path: str) -> bool:
        try:
            self._call(path, lambda client: client.head(path))
        except FileNotFoundError:
            return False
        return True

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

    def with_credentials(self, credentials: CredentialSource) -> BucketStore:
        return dataclasses.replace(self, credentials=credentials, connection_id=uuid.uuid4().hex)

    def fail_fast(self) -> BucketStore:
        return dataclasses.replace(self, retry_policy=FAIL_FAST)

    def check_readable(self) -> None:
        with suppress(_UnusableNames):
            self.fail_fast()._call("", lambda client: next(iter(client.list()), None))

    def check_writable(self) -> None:
        store = self.fail_fast()
        name = f".write-check-{uuid.uuid4().hex}"
        store.put(name, b"")
        store.delete(name)

    def _split(self, prefix: str, unusable: list[str]) -> tuple[list[str], list[ObjectMeta]]:
        """Return subfolders that can be listed concurrently, and the objects above them."""
        folders, objects = [prefix], []
        while len(folders) == 1:
            (folder,) = folders
            try:
                listed = self._call(folder, lambda client, folder=folder: client.list_with_delimiter(folder))
            except _UnusableNames:
                return [], [*objects, *self._list_any_names(folder, unusable)]
            folders = list(listed["common_prefixes"])
            objects += listed["objects"]
        return folders, objects

    def _list_folder(self, folder: str, unusable: list[str]) -> Sequence[ObjectMeta]:
        objects: list[ObjectMeta] = []

        def resume(client: S3Store) -> None:
            for page in client.list(folder, offset=objects[-1]["path"] if objects else None):
                objects.extend(page)

        try:
            self._call(folder, resume)
        except _UnusableNames:
            return self._list_any_names(folder, unusable)
        return objects

    def _list_any_names(self, folder: str, unusable: list[str]) -> Sequence[ObjectMeta]:
        """List with botocore: obstore returns nothing if one name cannot be used. Adds such names to ``unusable``."""
        bucket, root = _bucket_and_root(self.url)
        prefix = f"{root}{folder}/" if folder else root
        found: list[ObjectMeta] = []
        with self._explained(folder, _connection(self)):
            for page in _botocore_client(self).get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                found += [_object_meta(entry, root) for entry in page.get("Contents", [])]
        named = [each for each in found if each["path"]]  # without the marker of the store's own folder
        unusable += [each["path"] for each in named if _UNUSABLE_NAME.search(each["path"])]
        return [each for each in named if not _UNUSABLE_NAME.search(each["path"])]

    def _call(self, path: str, operation: Callable[[S3Store], T]) -> T:
        """Send a request; once more with new credentials if S3 refuses these."""
        connection = _connection(self)
        client = connection.client
        with self._explained(path, connection):
            try:
                return with_retries(lambda: operation(client), self.retry_policy)
            except Exception as error:
                if not refuses_credentials(error):
                    raise
            renewed = connection.renewed(client)
            return with_retries(lambda: operation(renewed), self.retry_policy)

    @contextmanager
    def _explained(self, path: str, connection: _Connection) -> Generator[None, None, None]:
        url = f"{self.url}/{path}".rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            if s3_error_code(error) != "NoSuchBucket":
                raise FileNotFoundError(url) from None
            raise connection.explained(error, url) from error
        except InvalidPathError as error:
            raise _UnusableNames(str(connection.explained(error, url))) from error
        except Exception as error:
            raise connection.explained(error, url) from error


class _UnusableNames(StorageError):
    """An object's name, or one in a listing, cannot be used."""


class _Connection:
    """One process's client for a store, with its open connections. Replaced when S3 refuses the credentials."""

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._credentials = _CredentialCache(store)
        self.client = self._connect()

    def renewed(self, refused: S3Store) -> S3Store:
        """Return the client that replaces ``refused``; created once, however many threads were refused."""
        with self._lock:
            if self.client is refused:
                self._credentials = _CredentialCache(self._store, self._credentials.identity)
                self.client = self._connect()
            return self.client

    def explained(self, error: Exception, url: str) -> StorageError:
        cause = self._credentials.failure or error
        return explain(cause, url, endpoint_url=self._store.settings.endpoint_url, identity=self._credentials.identity)

    def _connect(self) -> S3Store:
        settings = self._store.settings
        config: S3Config = {"region": settings.region or "us-east-1", "virtual_hosted_style_request": False}
        options: ClientConfig = {**_CLIENT}
        if settings.endpoint_url:
            config["endpoint"] = settings.endpoint_url
            options["allow_http"] = settings.endpoint_url.startswith("http://")
        if certificates := os.environ.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = _read_certificates(certificates)
        bucket, root = _bucket_and_root(self._store.url)
        return S3Store(
            bucket,
            prefix=root.rstrip("/") or None,
            config=config,
            client_options=options,
            retry_config=_RETRY_PARTS if self._store.multipart else _NO_RETRIES,
            credential_provider=self._credentials,
        )


class _CredentialCache:
    """Keeps credentials for obstore until shortly before they expire: obstore then asks ten times a second."""

    def __init__(self, store: BucketStore, identity: str = "in use") -> None:
        self._store = store
        self.identity = identity
        """What may be shown of the last credentials."""
        self._cached: Credentials | None = None
        self._renew_at: datetime | None = None
        self.failure: Exception | None = None
        """Why the source failed the last time, if it did; obstore passes on only the text."""

    def __call__(self) -> S3Credential:
        if self._cached is None or (self._renew_at is not None and _now() >= self._renew_at):
            self._cached = self._renewed()
        return {
            "access_key_id": self._cached.access_key_id,
            "secret_access_key": self._cached.secret_access_key,
            "token": self._cached.session_token,
            "expires_at": self._cached.expires_at,
        }

    def _renewed(self) -> Credentials:
        try:
            credentials = _required(self._store.credentials())
        except Exception as error:
            self.failure = error
            raise
        self.failure = None
        self.identity = credentials.identity
        if credentials.expires_at is not None:
            remaining = credentials.expires_at - _now()
            self._renew_at = credentials.expires_at - min(_RENEW_BEFORE_EXPIRY, remaining / 4)
        return credentials


def _required(credentials: Credentials | None) -> Credentials:
    if credentials is None:
        from botocore.exceptions import NoCredentialsError  # pyright: ignore[reportMissingTypeStubs]

        raise NoCredentialsError
    return credentials


def _connection(store: BucketStore) -> _Connection:
    """Return this process's connection for ``store`` and all its copies."""
    with _connection_lock:
        return _cached_connection(store)


@lru_cache(maxsize=32)
def _cached_connection(store: BucketStore) -> _Connection:
    return _Connection(store)


_connection_lock = threading.Lock()  # the cache alone would let concurrent threads create a connection each


def _bucket_and_root(url: str) -> tuple[str, str]:
    """Return the bucket, and what the names of all objects below ``url`` start with."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix and f"{prefix}/"


def _botocore_client(store: BucketStore) -> Any:
    import botocore.session  # pyright: ignore[reportMissingTypeStubs]
    from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]

    credentials = _required(store.credentials())
    return botocore.session.Session().create_client(
        "s3",
        region_name=store.settings.region or "us-east-1",
        endpoint_url=store.settings.endpoint_url,
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


def _read_certificates(file: str) -> bytes:
    try:
        ssl.create_default_context(cafile=file)
        return Path(file).read_bytes()
    except OSError as error:  # SSLError is an OSError
        raise StorageError(
            f"AWS_CA_BUNDLE is {file}, which contains no readable certificates; correct or remove it."
        ) from error


def resolve_settings(url: str) -> S3Settings:
    """Return endpoint and region from this process's AWS configuration: the environment, then the profile."""
    import botocore.session  # pyright: ignore[reportMissingTypeStubs]
    from botocore.exceptions import BotoCoreError  # pyright: ignore[reportMissingTypeStubs]

    session = botocore.session.Session()
    try:
        profile = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(profile.get("services"), {})
        configured = (services.get("s3", {}).get("endpoint_url"), profile.get("endpoint_url"))
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    except BotoCoreError as error:
        raise explain(error, url) from error
    environment = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    return S3Settings(_checked_endpoint(next(filter(None, (*environment, *configured)), None)), region)


def _checked_endpoint(endpoint_url: str | None) -> str | None:
    if endpoint_url is not None and ("@" in endpoint_url or "?" in endpoint_url):  # not shown: it may be secret
        raise UsageError(
            "AWS_ENDPOINT_URL must look like https://host or http://host:port, without a user name, a password or a "
            "query; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead."
        )
    if endpoint_url is not None and not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", endpoint_url):
        raise UsageError(f"AWS_ENDPOINT_URL is {endpoint_url!r}; it must look like https://host or http://host:port.")
    return endpoint_url


def _content(result: GetResult) -> tuple[str | None, bytes]:
    return result.meta["e_tag"], bytes(result.bytes())


def _put_if(client: S3Store, path: str, data: bytes, expected: bytes | None) -> bool:
    """Write an object if its content is ``expected``; whether it holds ``data`` now."""
    try:
        etag, found = _content(client.get(path))
    except FileNotFoundError:
        etag, found = None, None
    if found == data:
        return True
    return found == expected and _put_unless_changed(client, path, data, etag)


def _put_unless_changed(client: S3Store, path: str, data: bytes, etag: str | None) -> bool:
    """Write an object that still has this ETag, or that does not exist; whether the server did so."""
    try:
        client.put(path, data, mode="create" if etag is None else {"e_tag": etag})
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


def _now() -> datetime:
    return datetime.now(timezone.utc)
