"""Credentials of this process, served to other processes of a Ray cluster by an actor, from memory to memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from raytrain.errors import RaytrainError, UsageError
from raytrain.launch.ray.private_api import on_this_node
from raytrain.launch.ray.ray_errors import LOST_ACTOR
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import BucketCredentials, CredentialFields, CredentialSource, credentials_of_fields
from raytrain.storage.lent_credentials import CredentialBroker, CredentialLender
from raytrain.storage.scoped_keys import Scope, ScopedCredentials
from raytrain.storage.store import Store

NAMESPACE = "raytrain"
"""The namespace in Ray of the names that actors of raytrain have."""
_SERVED_AT_A_TIME = 64


@dataclass(frozen=True)
class ServedCredentials:
    """Asks an actor for the credentials that the driver has lent it; a ``LentCredentials``, pickled with a store.

    It holds no key, only the ticket and the handle of the actor, ``server``, which has a method ``credentials``.
    Everybody in the cluster can call an actor that has a name. Only who shows the ticket is given credentials.
    """

    server: Any
    ticket: str = field(repr=False)

    def __call__(self, cloud: str) -> BucketCredentials | None:
        """Return the credentials of a cloud, such as ``s3``, that were lent last; None if none were."""
        return credentials_of_fields(cloud, ray.get(self.server.credentials.remote(self.ticket, cloud)))


def lend_credentials(
    server: Any, stores: Iterable[Store], scope: Scope | None = None
) -> tuple[ServedCredentials, CredentialLender]:
    """Lend this process's credentials for the ``stores`` to other processes, through the actor ``server``.

    Returns what those processes get them by, and the lender. The credentials of each cloud that has a store are lent
    now, and again whenever ``CredentialLender.lend_if_due`` finds that they are due. If all stores are folders, nothing
    is lent: the actor has nothing that it could give away. With a ``scope``, what is lent is good for that alone.

    Raises UsageError if there is a scope, and a store is in another cloud than S3, or STS does not issue such
    credentials.
    """
    served = ServedCredentials(server, secrets.token_hex(16))

    def send(cloud: str, fields: CredentialFields | None) -> None:
        # The cluster keeps the arguments of a call nowhere. The answer is awaited, so that nobody asks for the
        # credentials before the actor has them.
        ray.get(server.lend.remote(served.ticket, cloud, fields))

    # One source for each cloud, made for its first store. Keys that are scoped are good for all stores of the run.
    sources: dict[str, CredentialSource] = {}
    for store in stores:
        if store.cloud is None or store.cloud.name in sources:
            continue
        if scope is None:
            sources[store.cloud.name] = store.cloud.credentials
        elif isinstance(store.cloud, S3):
            sources[store.cloud.name] = ScopedCredentials(scope, store.cloud.region or "us-east-1")
        else:
            raise UsageError(
                f"--scope-keys limits keys with AWS STS, and {store.url} is not in S3; leave the option out."
            )
    return served, CredentialLender(send, sources)


@contextmanager
def serving_credentials(
    stores: Iterable[Store], scope: Scope | None = None, *, for_run: str | None = None
) -> Iterator[tuple[ServedCredentials, CredentialLender]]:
    """Serve credentials as :func:`lend_credentials` does, with an actor that lives as long as the ``with`` block.

    ``for_run`` is the run that the block serves over HTTP. The actor then has a name of that run, which is free again
    as soon as this process has ended, in whatever way. Raises UsageError if another process serves a run of this name
    in the cluster, what :func:`lend_credentials` raises, and RaytrainError if the actor dies, or another one of which
    the block waits for an answer.
    """
    options: dict[str, Any] = {"max_concurrency": _SERVED_AT_A_TIME, "label_selector": on_this_node()}
    if for_run is not None:
        options |= {"name": f"serve {for_run}", "namespace": NAMESPACE}
    broker: Any = ray.remote(CredentialBroker)  # keys are lent later: the cluster keeps the arguments of constructors
    try:
        server = broker.options(num_cpus=0, **options).remote()
    except ValueError:  # Ray has no other error for a name that is taken
        raise UsageError(
            f"A run called {for_run!r} is served in this cluster already, and both would answer at /{for_run}; end "
            "that one first, or serve with --address local and another --port."
        ) from None
    try:
        yield lend_credentials(server, stores, scope)
    except LOST_ACTOR:
        raise RaytrainError(
            "A process that works for this command in the cluster has died: it crashed, or something killed it, such "
            "as the system for lack of memory; start the command again."
        ) from None
    finally:
        ray.kill(server)
