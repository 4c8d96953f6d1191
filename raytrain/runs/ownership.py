"""Ownership of a run: one process at a time, and storage that only the owner writes to."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import psutil

from raytrain.errors import OwnerChanged, StorageError, UsageError
from raytrain.runs.documents import CLAIM, CONFIG
from raytrain.storage.store import ObjectChanged, Store

RENEW_EVERY_S = 5.0  # seconds between two renewals of a claim
LEASE_S = 30.0  # seconds without a renewal after which an owner counts as dead
_LOOK_EVERY_S = 1.0
_READ_BACK_AFTER_S = 1.0  # without conditional writes: longer than another process takes from its look to its write
_logger = logging.getLogger(__name__)
_held: set[str] = set()  # the tokens of the claims that this process holds


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The content of ``claim.json``, and the guard of the owner's store.

    ``fence`` counts the owners of the run, ``renewed`` the renewals of this one.
    ``takeover`` is the number of the last owner that followed one which had not released the run; 0 if there is none.
    """

    path: ClassVar[str] = CLAIM
    token: str
    fence: int
    renewed: int = 0
    released: bool = False
    takeover: int = 0
    host: str = ""
    machine: str = ""
    pid: int = 0

    def to_json(self) -> bytes:
        """The claim as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def check(self, content: bytes | None, url: str) -> None:
        """Raise OwnerChanged unless the claim of the run in ``url`` has this ``content`` and names the same owner."""
        if content is None:
            raise OwnerChanged(
                f"{url}/{CLAIM} is gone, so this process has stopped: somebody deleted the run, or this machine "
                "has another folder there; start it again with --storage on S3 or in a folder that all machines share."
            )
        found = json.loads(content)
        if (found["token"], found["fence"]) != (self.token, self.fence):
            raise OwnerChanged(
                f"Process {found['pid']} on {found['host']} took over the run in {url}, because this process had "
                "not been heard of; this one has stopped and deleted nothing, so let the other one train."
            )


class RunClaim(AbstractContextManager["RunClaim"]):
    """A claim that this process holds, renewed by a thread until it is closed. ``store`` is the run's place in storage.

    Writes through :attr:`owned_store` raise OwnerChanged once somebody else owns the run.
    """

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self.claim = claim
        """As it was renewed last."""
        self._closed = threading.Event()
        _held.add(claim.token)
        self._renewer = threading.Thread(target=self._renew_until_closed, daemon=True, name="claim")
        self._renewer.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def owned_store(self) -> Store:
        """The run's place in storage, as only its owner may write to it. Can be sent to other processes."""
        return self._store.guarded(self.claim)

    def renew(self) -> bool:
        """Renew the claim; whether this process still owns the run."""
        return self._replace(dataclasses.replace(self.claim, renewed=self.claim.renewed + 1))

    def close(self) -> None:
        """Release the claim, so that the next owner need not wait. May be called twice."""
        self._closed.set()
        self._renewer.join()
        if self.claim.token not in _held:
            return
        _held.discard(self.claim.token)
        with suppress(StorageError):
            store = self._store.fail_fast()
            if self._replace(dataclasses.replace(self.claim, released=True)) and not store.exists(CONFIG):
                store.delete(CLAIM)  # the run never started
                store.remove_if_empty()

    def _replace(self, claim: Claim) -> bool:
        try:
            self._store.fail_fast().put_if(CLAIM, claim.to_json(), self.claim.to_json())
        except ObjectChanged:
            return False
        self.claim = claim
        return True

    def _renew_until_closed(self) -> None:
        owned = True
        while owned and not self._closed.wait(RENEW_EVERY_S):
            with suppress(StorageError):  # storage that is out of reach may be back the next time
                owned = self.renew()


def claim_run(store: Store, name: str) -> RunClaim:
    """Make this process the owner of the run ``name`` in ``store``; UsageError if, after ``LEASE_S``, another is."""
    before = _read(store)
    if before is not None and not before.released and not _is_known_dead(before):
        before = _outlive(store, before, name)
    fence, takeover = (before.fence + 1, before.takeover) if before else (1, 0)
    claim = Claim(
        token=secrets.token_hex(16),
        fence=fence,
        takeover=fence if before and not before.released else takeover,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
    )
    try:
        store.put_if(CLAIM, claim.to_json(), before and before.to_json())
    except ObjectChanged:
        raise _taken(name, _read(store)) from None
    if not store.has_conditional_puts():
        _read_back(store, claim, name)
    return RunClaim(store, claim)


def _outlive(store: Store, claim: Claim, name: str) -> Claim | None:
    """Watch the claim until its owner counts as dead; raises UsageError if the owner renews it. Returns the claim."""
    _logger.warning(
        "waiting %.0f s to see whether the last owner of run %r (process %d on %s) is still alive",
        LEASE_S,
        name,
        claim.pid,
        claim.host,
    )
    deadline = time.monotonic() + LEASE_S
    while True:
        over = time.monotonic() >= deadline  # before the look: this machine may have slept in between
        now = _read(store)
        if now is None or now.released:
            return now
        if now != claim:
            raise _taken(name, now)
        if over:
            return now
        time.sleep(_LOOK_EVERY_S)


def _read_back(store: Store, claim: Claim, name: str) -> None:
    """The next best without conditional writes: see whether somebody else claimed the run at the same moment."""
    _logger.info(
        "%s has no conditional writes; two owners of run %r that start at the same moment are noticed by reading back",
        store.url,
        name,
    )
    time.sleep(_READ_BACK_AFTER_S)
    if (found := _read(store)) != claim:
        raise _taken(name, found)


def _taken(name: str, claim: Claim | None) -> UsageError:
    where = f" (process {claim.pid} on {claim.host})" if claim else ""
    return UsageError(f"Run {name!r} is training at this moment{where}; `raytrain stop {name}` stops it.")


def _read(store: Store) -> Claim | None:
    try:
        return Claim(**json.loads(store.get(CLAIM)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise UsageError(
            f"{store.url}/{CLAIM} is damaged; make sure that nobody trains the run, and delete it."
        ) from None


def _is_known_dead(claim: Claim) -> bool:
    """Whether the owner was a process of this machine, since it was started, and has ended."""
    if not claim.machine or claim.machine != _machine():
        return False
    if claim.pid == os.getpid():
        return claim.token not in _held
    return not psutil.pid_exists(claim.pid)


@cache
def _machine() -> str:
    """Where process IDs mean the same: this start of this machine, and the container; empty if that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
