"""The driver's AWS credentials for the processes of a Ray cluster: sent from memory to memory, never stored."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from raytrain.backends.ray.private_api import on_this_node
from raytrain.storage.base import Store
from raytrain.storage.credential_broker import CredentialBroker, CredentialLender
from raytrain.storage.credentials import CredentialFields, Credentials, resolve
from raytrain.storage.scoped_credentials import Scope, ScopedCredentials

_ASKERS = 64


class CredentialServer:
    """An actor that serves the credentials that its driver lends it."""

    def __init__(self) -> None:
        self._broker = CredentialBroker()  # credentials are lent later: the cluster keeps a constructor's arguments

    def lend(self, ticket: str, fields: CredentialFields | None) -> None:
        """See :meth:`CredentialBroker.lend`."""
        self._broker.lend(ticket, fields)

    def credentials(self, ticket: str) -> CredentialFields | None:
        """See :meth:`CredentialBroker.credentials`."""
        return self._broker.credentials(ticket)


@dataclass(frozen=True)
class ServedCredentials:
    """A credential source that asks an actor with a method ``credentials``. Pickled with a store; it holds no AWS key.

    Everybody in the cluster can call an actor that has a name. Only who has the ticket is given credentials.
    """

    server: Any
    ticket: str = field(repr=False)

    def __call__(self) -> Credentials | None:
        fields: tuple[Any, ...] | None = ray.get(self.server.credentials.remote(self.ticket))
        return Credentials(*fields) if fields else None

    def _lend(self, fields: CredentialFields | None) -> None:
        # As an argument of a call, which the cluster keeps nowhere. Awaited, so that nobody asks before.
        ray.get(self.server.lend.remote(self.ticket, fields))


def lend_credentials(
    server: Any, stores: Iterable[Store], scope: Scope | None = None
) -> tuple[ServedCredentials, CredentialLender | None]:
    """A source of this process's credentials for the ``stores`` in other processes, through an actor that serves them.

    If a store is in S3, they are lent now and whenever the lender is told that they may be due again. If all are
    folders, there is no lender: the actor has nothing that it could give away. With a ``scope``, what is lent is good
    for that alone; raises UsageError if STS does not issue such credentials.
    """
    served = ServedCredentials(server, secrets.token_hex(16))
    in_s3 = [store.settings for store in stores if store.settings is not None]
    if not in_s3:
        return served, None
    source = resolve if scope is None else ScopedCredentials(scope, in_s3[0].region or "us-east-1")
    return served, CredentialLender(served._lend, source)


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
