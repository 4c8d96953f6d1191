"""The driver's credentials for the processes of a Ray cluster: sent from memory to memory, never stored."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from raytrain.errors import UsageError
from raytrain.launch.ray.private_api import on_this_node
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import BucketCredentials, CredentialFields, CredentialSource, restored
from raytrain.storage.lent_credentials import CredentialBroker, CredentialLender, Scope, ScopedCredentials
from raytrain.storage.store import Store

_ASKERS = 64


class CredentialServer:
    """An actor that serves the credentials that its driver lends it."""

    def __init__(self) -> None:
        self._broker = CredentialBroker()  # credentials are lent later: the cluster keeps a constructor's arguments

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        """See :meth:`CredentialBroker.lend`."""
        self._broker.lend(ticket, cloud, fields)

    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        """See :meth:`CredentialBroker.credentials`."""
        return self._broker.credentials(ticket, cloud)


@dataclass(frozen=True)
class ServedCredentials:
    """``LentCredentials`` that ask an actor with a method ``credentials``. Pickled with a store; they hold no key.

    Everybody in the cluster can call an actor that has a name. Only who has the ticket is given credentials.
    """

    server: Any
    ticket: str = field(repr=False)

    def __call__(self, cloud: str) -> BucketCredentials | None:
        return restored(cloud, ray.get(self.server.credentials.remote(self.ticket, cloud)))

    def _lend(self, cloud: str, fields: CredentialFields | None) -> None:
        # As an argument of a call, which the cluster keeps nowhere. Awaited, so that nobody asks before.
        ray.get(self.server.lend.remote(self.ticket, cloud, fields))


def lend_credentials(
    server: Any, stores: Iterable[Store], scope: Scope | None = None
) -> tuple[ServedCredentials, CredentialLender | None]:
    """This process's credentials for the ``stores`` in other processes, through an actor that serves them.

    Those of each cloud that has a store are lent now and whenever the lender is told that they may be due again. If all
    stores are folders, there is no lender: the actor has nothing that it could give away. With a ``scope``, what is
    lent is good for that alone; raises UsageError if STS does not issue such credentials.
    """
    served = ServedCredentials(server, secrets.token_hex(16))
    first: dict[str, Store] = {}
    for store in stores:
        if store.cloud is not None:
            first.setdefault(store.cloud.name, store)
    sources = {cloud: _lent_source(store, scope) for cloud, store in first.items()}
    return served, CredentialLender(served._lend, sources) if sources else None


def _lent_source(store: Store, scope: Scope | None) -> CredentialSource:
    assert store.cloud is not None
    if scope is None:
        return store.cloud.credentials
    if isinstance(store.cloud, S3):
        return ScopedCredentials(scope, store.cloud.region or "us-east-1")
    raise UsageError(f"--scope-keys limits keys with AWS STS, and {store.url} is not in S3; leave the option out.")


@contextmanager
def serving_credentials(
    stores: Iterable[Store], scope: Scope | None = None
) -> Iterator[tuple[ServedCredentials, CredentialLender | None]]:
    """Serve credentials as :func:`lend_credentials` does, with an actor that lives as long as the ``with`` block."""
    server: Any = (
        ray.remote(CredentialServer)
        .options(num_cpus=0, max_concurrency=_ASKERS, label_selector=on_this_node())
        .remote()
    )
    try:
        yield lend_credentials(server, stores, scope)
    finally:
        ray.kill(server)
