"""Storage below an S3 prefix: obstore carries the bytes, botocore says where S3 is and with what keys."""

from __future__ import annotations

import dataclasses
import os
import re
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from obstore.store import S3Store

from raytrain.errors import StorageError, UsageError
from raytrain.storage.base import ObjectChanged, S3Settings, Store, StoredObject, threads
from raytrain.storage.credentials import Credentials, CredentialSource
from raytrain.storage.errors import explain, refuses_credentials
from raytrain.storage.retry import FIRST_PAUSE_S, HASTY, LONGEST_PAUSE_S, PATIENT, repeat

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

T = TypeVar("T")

_EARLY = timedelta(minutes=5)
_CLIENT: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(minutes=30),  # of a whole transfer: a checkpoint may take long, as long as it moves
}
_PART_BYTES = 5 << 20  # more is uploaded in parts, side by side
_PARTS: RetryConfig = {
    "max_retries": PATIENT.max_repeats,
    "retry_timeout": timedelta(seconds=PATIENT.within_s),
    "backoff": {"init_backoff": timedelta(seconds=FIRST_PAUSE_S), "max_backoff": timedelta(seconds=LONGEST_PAUSE_S), "base": 2},
}
_ONCE: RetryConfig = {**_PARTS, "max_retries": 0}  # all others are repeated, and counted, here


@dataclass(frozen=True)
class BucketStore(Store):
    """See :class:`Store`. ``url`` is ``s3://bucket/prefix``."""

    url: str
    settings: S3Settings
    credentials: CredentialSource = field(compare=False, repr=False)
    token: str = field(repr=False)
    """Tells stores apart that differ in their credentials, in every process that they are sent to."""
    hasty: bool = False
    """Give up within seconds where nothing answers."""
    in_parts: bool = False
    """For uploads in parts, of which each is repeated by itself."""

    def get(self, path: str, etag: str = "") -> bytes:
        found, data = self._call(path, lambda client: _content(client.get(path)))
        if etag and found and _bare(found) != _bare(etag):
            raise ObjectChanged(f"{self.url}/{path}")
        return data

    def put(self, path: str, data: bytes) -> None:
        store = dataclasses.replace(self, in_parts=True) if len(data) > _PART_BYTES else self
        store._call(path, lambda client: client.put(path, data, chunk_size=_PART_BYTES))

    def delete(self, path: str) -> None:
        self._call(path, lambda client: client.delete(path))

    def exists(self, path: str) -> bool:
        try:
            self._call(path, lambda client: client.head(path))
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        folders, objects = self._divide(prefix.strip("/"))
        for listed in (objects, *threads().map(self._list_below, folders)):
            yield from (_stored(found) for found in listed if found["path"] != prefix.strip("/"))  # a folder's own marker is no object

    def with_credentials(self, credentials: CredentialSource) -> BucketStore:
        return dataclasses.replace(self, credentials=credentials, token=uuid.uuid4().hex)

    def fail_fast(self) -> BucketStore:
        return dataclasses.replace(self, hasty=True)

    def check_readable(self) -> None:
        self.fail_fast()._call("", lambda client: next(iter(client.list()), None))

    def check_writable(self) -> None:
        hasty = self.fail_fast()
        name = f".write-check-{uuid.uuid4().hex}"
        hasty.put(name, b"")
        hasty.delete(name)

    def _divide(self, prefix: str) -> tuple[list[str], list[ObjectMeta]]:
        """Folders that can be listed side by side, and the objects that lie above them."""
        folders, objects = [prefix], []
        while len(folders) == 1:
            (folder,) = folders
            listed = self._call(folder, lambda client, folder=folder: client.list_with_delimiter(folder))
            folders = list(listed["common_prefixes"])
            objects += listed["objects"]
        return folders, objects

    def _list_below(self, folder: str) -> Sequence[ObjectMeta]:
        objects: list[ObjectMeta] = []

        def go_on(client: S3Store) -> None:
            for page in client.list(folder, offset=objects[-1]["path"] if objects else None):
                objects.extend(page)

        self._call(folder, go_on)
        return objects

    def _call(self, path: str, operation: Callable[[S3Store], T]) -> T:
        """Carry out ``operation``; once more with new keys where S3 no longer takes these."""
        connection = _connection(self)
        client = connection.client
        patience = HASTY if self.hasty else PATIENT
        with self._explained(path, connection):
            try:
                return repeat(lambda: operation(client), patience)
            except Exception as error:
                if not refuses_credentials(error):
                    raise
            renewed = connection.renewed(client)
            return repeat(lambda: operation(renewed), patience)

    @contextmanager
    def _explained(self, path: str, connection: _Connection) -> Iterator[None]:
        where = f"{self.url}/{path}".rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" not in str(error):
                raise FileNotFoundError(where) from None
            raise connection.explained(error, where) from error
        except Exception as error:
            raise connection.explained(error, where) from error


class _Connection:
    """What one process holds for a store: a client with its open connections, made anew when the keys are refused."""

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._keys = _Keys(store)
        self.client = self._connect()

    def renewed(self, refused: S3Store) -> S3Store:
        """The client that comes after ``refused``; made once, however many threads were refused."""
        with self._lock:
            if self.client is refused:
                self._keys = _Keys(self._store, self._keys.identity)
                self.client = self._connect()
            return self.client

    def explained(self, error: Exception, url: str) -> StorageError:
        cause = self._keys.failure or error
        return explain(cause, url, endpoint_url=self._store.settings.endpoint_url, identity=self._keys.identity)

    def _connect(self) -> S3Store:
        settings = self._store.settings
        config: S3Config = {"region": settings.region or "us-east-1", "virtual_hosted_style_request": False}
        options: ClientConfig = {**_CLIENT}
        if settings.endpoint_url:
            config["endpoint"] = settings.endpoint_url
            options["allow_http"] = settings.endpoint_url.startswith("http://")
        if certificates := os.environ.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = _read_certificates(certificates)
        bucket, _, prefix = self._store.url.removeprefix("s3://").partition("/")
        return S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=options,
            retry_config=_PARTS if self._store.in_parts else _ONCE,
            credential_provider=self._keys,
        )


class _Keys:
    """Keys for obstore, held until shortly before they expire: obstore asks ten times a second when that is near."""

    def __init__(self, store: BucketStore, identity: str = "in use") -> None:
        self._store = store
        self.identity = identity
        """What may be shown of the keys that were held last."""
        self._held: Credentials | None = None
        self._ask_again_at: datetime | None = None
        self.failure: Exception | None = None
        """Why there were none, the last time; obstore passes on only its text."""

    def __call__(self) -> S3Credential:
        if self._held is None or (self._ask_again_at is not None and _now() >= self._ask_again_at):
            self._ask()
        assert self._held is not None
        return {
            "access_key_id": self._held.access_key_id,
            "secret_access_key": self._held.secret_access_key,
            "token": self._held.session_token,
            "expires_at": self._held.expires_at,
        }

    def _ask(self) -> None:
        try:
            held = self._store.credentials()
            if held is None:
                raise LookupError("NoCredentials")
        except Exception as error:
            self.failure = error
            raise
        self.failure = None
        self._held, self.identity = held, held.identity
        if held.expires_at is not None:
            left = held.expires_at - _now()
            self._ask_again_at = held.expires_at - min(_EARLY, left / 4)


def _connection(store: BucketStore) -> _Connection:
    """This process's connection for ``store`` and all of its copies."""
    with _connecting:
        return _connected(store)


@lru_cache(maxsize=32)
def _connected(store: BucketStore) -> _Connection:
    return _Connection(store)


_connecting = threading.Lock()  # the cache alone would let threads that come at once make a connection each


def _read_certificates(file: str) -> bytes:
    try:
        ssl.create_default_context(cafile=file)
        return Path(file).read_bytes()
    except OSError as error:  # SSLError is one, too
        raise StorageError(f"AWS_CA_BUNDLE is {file}, where no certificates can be read; correct it or remove it.") from error


def resolve_settings(url: str) -> S3Settings:
    """Endpoint and region by the standard AWS configuration of this process: environment, then the profile."""
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
    asked = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    return S3Settings(_checked(next(filter(None, (*asked, *configured)), None)), region)


def _checked(endpoint_url: str | None) -> str | None:
    if endpoint_url is not None and not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", endpoint_url):
        raise UsageError(f"AWS_ENDPOINT_URL is {endpoint_url!r}; it must look like https://host or http://host:port.")
    return endpoint_url


def _content(result: GetResult) -> tuple[str | None, bytes]:
    return result.meta["e_tag"], bytes(result.bytes())


def _bare(etag: str) -> str:
    """An ETag without what servers put round it in one answer and not in another."""
    return etag.removeprefix("W/").strip('"')


def _stored(found: ObjectMeta) -> StoredObject:
    return StoredObject(found["path"], found["size"], found["e_tag"] or "", found["last_modified"])


def _now() -> datetime:
    return datetime.now(timezone.utc)
