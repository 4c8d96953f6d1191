"""A run's place in storage as its owner sees it: each write and deletion first checks that the run is still its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raytrain.errors import OwnerChanged
from raytrain.runs.layout import CLAIM
from raytrain.storage.base import Store, StoredObject
from raytrain.storage.clouds.cloud import Cloud
from raytrain.storage.credentials import LentCredentials


@dataclass(frozen=True)
class Owner:
    """Who owns a run: a random token, and the number of the owner, counted from the run's first one."""

    token: str
    fence: int

    def check(self, store: Store) -> None:
        """Raise OwnerChanged unless the claim in the run's ``store`` names this owner."""
        try:
            found = json.loads(store.get(CLAIM))
        except FileNotFoundError:
            raise OwnerChanged(
                f"{store.url}/{CLAIM} is gone, so this process has stopped: somebody deleted the run, or this machine "
                "has another folder there; start it again with --storage on S3 or in a folder that all machines share."
            ) from None
        if (found["token"], found["fence"]) != (self.token, self.fence):
            raise OwnerChanged(
                f"Process {found['pid']} on {found['host']} took over the run in {store.url}, because this process had "
                "not been heard of; this one has stopped and deleted nothing, so let the other one train."
            )


@dataclass(frozen=True)
class OwnedStore(Store):
    """The ``store`` of a run, to which only ``owner`` may write: others get OwnerChanged for writing and deleting."""

    url: str
    cloud: Cloud | None
    store: Store
    owner: Owner

    def get(self, path: str, etag: str = "") -> bytes:
        return self.store.get(path, etag)

    def get_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self.store.get_range(path, start, num_bytes)

    def put(self, path: str, data: bytes) -> None:
        self.owner.check(self.store)
        self.store.put(path, data)

    def put_file(self, path: str, file: Path) -> None:
        self.owner.check(self.store)
        self.store.put_file(path, file)

    def put_if(self, path: str, data: bytes, expected: bytes | None) -> None:
        self.owner.check(self.store)
        self.store.put_if(path, data, expected)

    def has_conditional_puts(self) -> bool:
        return self.store.has_conditional_puts()

    def append(self, path: str, data: bytes) -> None:
        self.owner.check(self.store)
        self.store.append(path, data)

    def truncate(self, path: str, num_bytes: int) -> None:
        self.owner.check(self.store)
        self.store.truncate(path, num_bytes)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        return self.store.list(prefix)

    def delete(self, path: str) -> None:
        self.owner.check(self.store)
        self.store.delete(path)

    def remove_if_empty(self) -> None:
        self.owner.check(self.store)
        self.store.remove_if_empty()

    def exists(self, path: str) -> bool:
        return self.store.exists(path)

    def with_lent_credentials(self, lent: LentCredentials) -> OwnedStore:
        return dataclasses.replace(self, store=self.store.with_lent_credentials(lent))

    def fail_fast(self) -> OwnedStore:
        return dataclasses.replace(self, store=self.store.fail_fast())

    def check_readable(self) -> None:
        self.store.check_readable()
