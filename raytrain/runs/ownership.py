"""Ownership of a run: one process at a time, and storage that only the owner writes to.

The owner of a run is named by the run's ``claim.json``. Three rules keep a run whole, whoever dies, sleeps or loses
its connection in the middle of a request:

1. *A claim changes only from the content that its writer has read* (``Store.put_if``, a conditional write). Of two
   processes that claim a run at the same moment, one fails. Each renewal changes the content, too, so that nobody takes
   over a run whose owner has renewed its claim meanwhile.
2. *A living owner renews its claim* every ``RENEW_EVERY_S`` seconds, from a thread. Another process may take over if
   the owner has released the claim, if its process is known to be dead (same machine, not rebooted since), or if no
   renewal came for ``LEASE_S`` seconds by the clock of the process that waits. Only contents are compared, no times,
   because the clocks of machines may differ.
3. *Each write checks the claim first.* A process that slept past the end of its lease learns at its next write that the
   run has another owner: the claim's ``fence``, the number of the owner, and ``token``, which is random, are not its
   own. The write raises :class:`OwnerChanged`, and the process stops and deletes nothing.

Between the check and the write, another process may take over. In a folder, a lock rules this out, which a change of
the claim needs, too. In a bucket, the write itself is conditional. A checkpoint is too large for that, so an owner that
took over from one which had not released the run uses names of its own: ``takeover`` is its ``fence``, and a part of
the names of its checkpoints. Whatever its predecessor still writes or deletes then has another name.

With servers that have no conditional writes, the claim is read back a moment after it was written.
"""

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

from raytrain.errors import OwnerChanged, StorageError, UsageError, shell_command
from raytrain.runs.documents import CLAIM, CONFIG, EVENTS, SKIPPED, is_run_file, known_fields, parse_object
from raytrain.runs.stored_checkpoints import newest_checkpoint, step_and_takeover
from raytrain.storage.store import ObjectChanged, Store

RENEW_EVERY_S = 5.0  # seconds between two renewals of a claim
LEASE_S = 30.0  # seconds without a renewal after which an owner counts as dead
POLL_EVERY_S = 1.0  # seconds between two polls of the claim of an owner that may be dead
_READ_BACK_AFTER_S = 1.0  # seconds: longer than another process needs between reading and writing the claim
_MAX_PID = 2**31 - 1  # the system takes no larger number of a process
_BEFORE_START = {CLAIM, EVENTS, SKIPPED}  # documents that a run may have before it has options
_log = logging.getLogger(__name__)
_held: set[str] = set()  # the tokens of the claims that this process holds


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The content of ``claim.json``, and the guard of the owner's store.

    Attributes:
        token: 32 random characters, which no other owner has.
        fence: the number of the owner, counted from 1.
        renewed: how often the owner has renewed its claim.
        released: True if the owner has ended, so that the next one need not wait.
        takeover: the fence of the last owner whose predecessor had not released the run; 0 if there was none.
        host: name of the owner's host, for messages.
        machine: :func:`machine_id` of the owner; empty if unknown.
        pid: the owner's process.
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
        """Return the claim as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> Claim:
        """Return the claim in the content of a ``claim.json``; raise ValueError if it is damaged."""
        document = parse_object(content)
        known = known_fields(cls, document)
        if known != document or not {"token", "fence"} <= known.keys() or not 0 <= known.get("pid", 0) <= _MAX_PID:
            raise ValueError("it is no claim")
        return cls(**known)

    @property
    def may_be_alive(self) -> bool:
        """True unless the owner has released the run, or its process is known to have ended."""
        # Process numbers can be compared only on one machine that has not rebooted, whose ID is known. A claim with the
        # number of this process is dead if this process does not hold it: an earlier process had the same number.
        is_known_dead = self.machine == machine_id() != "" and (
            self.token not in _held if self.pid == os.getpid() else not psutil.pid_exists(self.pid)
        )
        return not self.released and not is_known_dead

    def check(self, content: bytes | None, url: str) -> None:
        """Raise OwnerChanged unless the claim of the run at ``url``, whose content is given, still names this owner."""
        # If the claim is gone, the run was deleted, and one more write must not bring it back.
        if content is None:
            is_bucket = "://" in url  # which all machines reach by its name
            other_reason = "" if is_bucket else ", or this machine has another folder there"
            where = "" if is_bucket else " with --storage on S3 or in a folder that all machines share"
            raise OwnerChanged(
                f"{url}/{CLAIM} is gone, so this process has stopped: somebody deleted the run{other_reason}; start it "
                f"again{where}."
            )
        try:
            stored = Claim.parse(content)
        except ValueError:
            raise OwnerChanged(
                f"{url}/{CLAIM} is damaged, so this process cannot know whether it still owns the run, and has "
                "stopped; make sure that nobody else trains it, delete that file, and resume the run with --resume."
            ) from None
        # Renewals change other fields, and so does the release.
        if (stored.token, stored.fence) != (self.token, self.fence):
            raise OwnerChanged(
                f"Process {stored.pid} on {stored.host} took over the run in {url}, because this process had "
                "not been heard of; this one has stopped and deleted nothing, so let the other one train."
            )


class RunClaim(AbstractContextManager["RunClaim"]):
    """A claim that this process holds; a thread renews it until it is closed.

    Made by :func:`claim_run`. Writes through :attr:`owned_store` raise OwnerChanged once another process owns the run.
    """

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self.claim = claim
        """The content of ``claim.json`` as this process wrote it last."""
        self._closed = threading.Event()
        self._renewer = threading.Thread(target=self._renew_until_closed, daemon=True, name="claim")
        self._renewer.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def owned_store(self) -> Store:
        """The store of the run, in which each write checks the claim first. Can be sent to other processes."""
        return self._store.guarded(self.claim)

    def renew(self) -> bool:
        """Renew the claim; return True if this process still owns the run. Raises StorageError."""
        return self._replace(dataclasses.replace(self.claim, renewed=self.claim.renewed + 1))

    def close(self) -> None:
        """Release the claim, so that the next owner need not wait. May be called twice.

        If the run has no options, because it never started, its claim and its first events are deleted, and with them a
        folder that is empty then. Nothing is raised if storage is out of reach.
        """
        self._closed.set()
        self._renewer.join()  # before the release: both replace the claim
        if self.claim.token not in _held:
            return
        _held.discard(self.claim.token)
        with suppress(StorageError):
            store = self._store.fail_fast()
            if self._replace(dataclasses.replace(self.claim, released=True)) and not store.exists(CONFIG):
                # The run never started. With other documents, somebody has deleted the options of one: keep them all.
                if {stored.path for stored in store.list()} <= _BEFORE_START:
                    for path in _BEFORE_START - {CLAIM}:
                        store.delete(path)
                store.delete(CLAIM)
                store.remove_if_empty()

    def _replace(self, claim: Claim) -> bool:
        """Replace the claim that this process wrote last by ``claim``; return False if another one is there by now."""
        try:
            self._store.fail_fast().put_if(CLAIM, claim.to_json(), self.claim.to_json())
        except ObjectChanged:
            return False
        self.claim = claim
        return True

    def _renew_until_closed(self) -> None:
        """Renew the claim, in a thread, until it is closed or another process owns the run."""
        owned = True
        while owned and not self._closed.wait(RENEW_EVERY_S):
            with suppress(StorageError):  # storage that is out of reach may be back the next time
                owned = self.renew()


def claim_run(store: Store, name: str) -> RunClaim:
    """Make this process the owner of the run ``name`` in ``store``, and return its claim.

    Waits up to ``LEASE_S`` seconds if the last owner may be alive. Raises UsageError if it is, or if the claim in
    storage is damaged, and StorageError if storage is out of reach.

    Example:
        >>> with claim_run(store, "digits") as claim:
        ...     claim.owned_store.put("config.json", b"{}")
    """
    before = read_claim(store)
    if before is not None and before.may_be_alive:
        before = _wait_for_lease(store, before, name)

    # The first owner has the fence 1. One that follows an owner which has not released the run takes over: its own
    # fence is the takeover. Any other owner keeps the takeover of the owner before. If somebody has deleted the claim,
    # it is known by the names of the checkpoints, after which those of this owner must sort.
    if before is not None:
        fence, takeover = before.fence + 1, before.takeover
    else:
        newest = newest_checkpoint(store)
        takeover = step_and_takeover(newest)[1] if newest else 0
        fence = takeover + 1
    takes_over = before is not None and not before.released
    claim = Claim(
        token=secrets.token_hex(16),
        fence=fence,
        takeover=fence if takes_over else takeover,
        host=socket.gethostname(),
        machine=machine_id(),
        pid=os.getpid(),
    )
    # This process holds the claim from now on: another thread of it that reads one which is not held takes over.
    _held.add(claim.token)
    try:
        _write_claim(store, claim, before, name)
    except BaseException:
        _held.discard(claim.token)
        raise
    if before is not None:  # the last owner may have been killed in the middle of a checkpoint
        store.abort_uploads(is_run_file, LEASE_S)
    return RunClaim(store, claim)


def _write_claim(store: Store, claim: Claim, before: Claim | None, name: str) -> None:
    """Write ``claim`` in place of the one ``before``; raise UsageError if another process has written one since."""
    try:
        store.put_if(CLAIM, claim.to_json(), before and before.to_json())
    except ObjectChanged:
        raise _is_training(store, name, read_claim(store)) from None

    if not store.has_conditional_puts():
        # Two processes may both have written: the owner is the one whose claim is there a moment later.
        _log.info(
            "%s has no conditional writes; two owners of run %r that start at the same moment are noticed by reading "
            "back",
            store.url,
            name,
        )
        time.sleep(_READ_BACK_AFTER_S)
        if (stored := read_claim(store)) != claim:
            raise _is_training(store, name, stored)


def _wait_for_lease(store: Store, claim: Claim, name: str) -> Claim | None:
    """Poll ``claim`` until its lease is over or its owner releases it; return the claim at that time, None if deleted.

    Raises UsageError if its owner renews it, or another process owns the run by now.
    """
    _log.warning(
        "waiting %.0f s to see whether the last owner of run %r (process %d on %s) is still alive",
        LEASE_S,
        name,
        claim.pid,
        claim.host,
    )
    # Any change of the claim is a sign of life of its owner, except its release.
    deadline = time.monotonic() + LEASE_S
    while True:
        is_over = time.monotonic() >= deadline  # before the claim is read: this machine may have slept in between
        stored = read_claim(store)
        if stored is None or stored.released:
            return stored
        if stored != claim:
            raise _is_training(store, name, stored)
        if is_over:
            return stored
        time.sleep(POLL_EVERY_S)


def _is_training(store: Store, name: str, claim: Claim | None) -> UsageError:
    """Return the error for a run in ``store`` that the process of ``claim`` trains, with the command that stops it."""
    where = f" (process {claim.pid} on {claim.host})" if claim else ""
    storage = store.url.removesuffix(f"/{name}")
    with suppress(FileNotFoundError):  # there may be no current folder
        storage = "./runs" if storage == os.path.abspath("runs") else storage
    stop = shell_command("stop", name, storage=storage)
    when = "" if store.exists(CONFIG) else " once it has started"  # until then, `stop` finds no such run
    return UsageError(f"Run {name!r} is training at this moment{where}; `{stop}` stops it{when}.")


def read_claim(store: Store) -> Claim | None:
    """Return the claim in the ``store`` of a run; None if nobody has owned it. Raise UsageError if it is damaged."""
    try:
        return Claim.parse(store.get(CLAIM))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UsageError(
            f"{store.url}/{CLAIM} is damaged; make sure that nobody trains the run, and delete it."
        ) from None


@cache
def machine_id() -> str:
    """Return an ID within which process numbers are unique: boot of the machine, and container; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
