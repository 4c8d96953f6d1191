"""The run's actor, beside the driver: its monitor, the credentials it lends, and the directory of cached blocks."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from datetime import datetime, timezone
from typing import Any

import ray

from raytrain.backends.ray.stream_queues import FEED, WAIT, StreamQueues
from raytrain.errors import RaytrainError
from raytrain.runs.bad_images import BadImageLimit
from raytrain.runs.history import History
from raytrain.runs.monitor import RunMonitor
from raytrain.storage import credentials
from raytrain.storage.base import S3Settings, Store, open_store
from raytrain.storage.credentials import Credentials, CredentialSource, NodeOrServed

NAMESPACE = "raytrain"
_WAITERS = 256  # workers
_FEEDERS = 4  # one listens, one feeds each data set; a stream that was given up may still hold one
_LEND_EVERY_S = 60.0
_ASK_AGAIN_S = 5.0


class Coordinator(RunMonitor, StreamQueues):
    """A :class:`RunMonitor` for other processes to call, in the order in which each of them calls.

    Calls that wait run beside the others: the workers' in the concurrency group ``wait``, the driver's in ``feed``.
    """

    def __init__(self) -> None:
        StreamQueues.__init__(self)
        # What a run is comes with begin: arguments of a constructor are kept by the cluster, and credentials must not be.
        self._credentials: Credentials | None = None
        self._changed = threading.Condition()
        self._blocks: dict[str, list[Any]] = defaultdict(list)
        self._failure: str | None = None
        self._outcome: dict[str, Any] | None = None
        self._controller: Any = None

    def begin(
        self,
        run_name: str,
        num_steps: int,
        steps_per_epoch: int,
        run_url: str,
        settings: S3Settings | None,
        bad_images: BadImageLimit,
    ) -> None:
        """Take up the run: open its history in storage."""
        store = open_store(run_url, settings=settings)
        history = History(_entered(store, lambda: self._credentials))
        RunMonitor.__init__(self, run_name, num_steps, steps_per_epoch, history, bad_images=bad_images)

    def lend(self, fields: tuple[Any, ...] | None) -> None:
        """Keep the driver's credentials (their fields) for processes that have none of their own."""
        self._credentials = Credentials(*fields) if fields else None

    @ray.method(concurrency_group=WAIT)
    def credentials(self) -> tuple[Any, ...] | None:
        """The fields of the driver's credentials, from memory to memory."""
        return self._credentials and dataclasses.astuple(self._credentials)

    @ray.method(concurrency_group=WAIT)
    def wait_for_stop(self, timeout_s: float) -> str | None:
        """See :meth:`RunMonitor.wait_for_stop`."""
        return super().wait_for_stop(timeout_s)

    def received(self) -> None:
        """Return when the earlier calls of the same process have."""

    @ray.method(concurrency_group=WAIT)
    def flush(self) -> None:
        """See :meth:`RunMonitor.flush`; beside the other calls, for storage may be slow."""
        super().flush()

    def add_blocks(self, name: str, refs: list[Any]) -> None:
        """Note the next blocks of the cached data set ``name``."""
        with self._changed:
            self._blocks[name] += refs
            self._changed.notify_all()

    def fail_blocks(self, reason: str) -> None:
        """Note that a cached data set cannot be read to its end."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    @ray.method(concurrency_group=WAIT)
    def blocks(self, name: str, first: int, timeout_s: float) -> list[Any]:
        """References of the blocks of ``name`` from ``first`` on; waits for one, at most ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._blocks[name]) > first, timeout_s)
            if self._failure:
                raise RaytrainError(self._failure)
            return self._blocks[name][first:]

    def controlled_by(self, controller: Any) -> None:
        """Keep the handle of Ray Train's controller of this run."""
        self._controller = controller

    def controller(self) -> Any:
        """What :meth:`controlled_by` was told last; None before it begins."""
        return self._controller

    def conclude(self, outcome: dict[str, Any]) -> None:
        """Keep what the workers say of how it ended: the driver asks for it."""
        self._outcome = outcome

    def outcome(self) -> dict[str, Any] | None:
        """What :meth:`conclude` was told, with an ``error`` that only the monitor knows of; None where the workers said nothing."""
        if self._outcome and self.failure:
            return {"error": self.failure, **self._outcome}
        return self._outcome


def start_coordinator(name: str, kind: type[Coordinator] = Coordinator) -> Any:
    """The actor of the run called ``name``, on the driver's node; its handle is found by name from anywhere in the cluster."""
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(concurrency_groups={WAIT: _WAITERS, FEED: _FEEDERS})(kind)  # pyright: ignore
        .options(
            name=f"run:{name}",
            namespace=NAMESPACE,
            num_cpus=0,
            label_selector={ray._raylet.RAY_NODE_ID_KEY: here},  # pyright: ignore
        )
        .remote()
    )


class CredentialLender:
    """Lends this process's credentials to an actor: now, and again before they expire, whenever :meth:`lend_if_due` is called."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._lend()

    def lend_if_due(self) -> None:
        """Lend them again where a third of their life has gone, or a minute: a file of keys may have been rewritten."""
        if time.monotonic() >= self._next:
            self._lend()

    def _lend(self) -> None:
        try:
            resolved = credentials.resolve()
        except Exception:  # those that were lent may last until the source is back; who is refused with them says so
            self._next = time.monotonic() + _ASK_AGAIN_S
            return
        # As an argument of a call: it goes from memory to memory, and neither the cluster nor a file keeps it.
        # Waited for: who asks for them does so beside other calls, and might come first.
        ray.get(self._coordinator.lend.remote(resolved and dataclasses.astuple(resolved)))
        life_s = _LEND_EVERY_S
        if resolved and resolved.expires_at:
            life_s = (resolved.expires_at - datetime.now(timezone.utc)).total_seconds() / 3
        self._next = time.monotonic() + max(1.0, min(_LEND_EVERY_S, life_s))


def find_coordinator(name: str) -> Any:
    """The actor of a run that is training in the connected cluster; raises ValueError where there is none."""
    return ray.get_actor(f"run:{name}", namespace=NAMESPACE)


def with_cluster_credentials(store: Store, coordinator: Any) -> Store:
    """The same store for processes of the cluster: with their node's own role, else with what the actor lends them."""
    return _entered(store, ServedCredentials(coordinator))


def _entered(store: Store, lent: CredentialSource) -> Store:
    # A role of AWS means nothing to a server that is not Amazon's.
    amazon = store.settings is not None and store.settings.endpoint_url is None
    return store.with_credentials(NodeOrServed(lent) if amazon else lent)


class ServedCredentials:
    """The driver's credentials as its actor lends them: a source that can be pickled, for there is no secret in it."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def __call__(self) -> Credentials | None:
        fields: Any = ray.get(self._coordinator.credentials.remote())
        return Credentials(*fields) if fields else None
