"""The driver's AWS credentials for the processes of a Ray cluster: sent from memory to memory, never stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raytrain.backends.ray.private_api import on_this_node
from raytrain.storage.credential_broker import CredentialBroker, CredentialLender
from raytrain.storage.credentials import Credentials

NAMESPACE = "raytrain"
_ASKERS = 64


class CredentialServer:
    """An actor that serves the credentials that its driver lends it."""

    def __init__(self) -> None:
        self._broker = CredentialBroker()  # credentials are lent later: the cluster keeps a constructor's arguments

    def lend(self, fields: tuple[Any, ...] | None) -> None:
        """See :meth:`CredentialBroker.lend`."""
        self._broker.lend(fields)

    def credentials(self) -> tuple[Any, ...] | None:
        """See :meth:`CredentialBroker.credentials`."""
        return self._broker.credentials()


@dataclass(frozen=True)
class ServedCredentials:
    """A credential source that asks an actor with a method ``credentials``. It is pickled, and holds no secret."""

    server: Any

    def __call__(self) -> Credentials | None:
        fields: tuple[Any, ...] | None = ray.get(self.server.credentials.remote())
        return Credentials(*fields) if fields else None


def lend_credentials(server: Any) -> CredentialLender:
    """Lend this process's credentials to an actor with a method ``lend``, now and whenever they are due again.

    They travel as an argument of a call: the cluster keeps it nowhere. The call is awaited, so that nobody asks before.
    """
    return CredentialLender(lambda fields: ray.get(server.lend.remote(fields)))


@contextmanager
def serving_credentials(name: str) -> Iterator[tuple[ServedCredentials, CredentialLender]]:
    """An actor called ``name`` that serves this process's credentials, for as long as the ``with`` block runs."""
    server: Any = (
        ray.remote(CredentialServer)
        .options(name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=_ASKERS, label_selector=on_this_node())
        .remote()
    )
    try:
        yield ServedCredentials(server), lend_credentials(server)
    finally:
        ray.kill(server)
