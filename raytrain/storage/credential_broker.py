"""Lend the driver's credentials to processes on nodes that have no role of their own.

The driver sends its credentials with a :class:`CredentialLender` to a :class:`CredentialBroker` in another process.
How they travel is up to the caller; they must stay in memory. Whoever asks for them shows a ticket, which the driver
gives to its own processes only: others may be able to call the same broker.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping

from raytrain.storage.credentials import (
    BucketCredentials,
    CredentialFields,
    CredentialSource,
    ask_again_after_s,
    restored,
)

_MIN_WAIT_S = 1.0
_RETRY_AFTER_S = 5.0


class CredentialBroker:
    """Holds the credentials that the driver lent last for each cloud, in the memory of this process."""

    def __init__(self) -> None:
        self._lent: dict[str, BucketCredentials | None] = {}
        self._ticket: str | None = None

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        """Replace the lent credentials of a cloud, such as ``s3``; None if the driver has none.

        The first ticket is the one that counts. Raises PermissionError for another one.
        """
        self._ticket = self._ticket or ticket
        self._check(ticket)
        self._lent[cloud] = restored(cloud, fields)

    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        """Return the fields of the credentials lent for a cloud, for another process; None if there are none.

        Raises PermissionError if nothing was lent with this ticket.
        """
        self._check(ticket)
        lent = self._lent.get(cloud)
        return lent.fields() if lent else None

    def source(self, cloud: str) -> BucketCredentials | None:
        """Return the lent credentials of a cloud: ``LentCredentials`` for stores in this process."""
        return self._lent.get(cloud)

    def _check(self, ticket: str) -> None:
        if self._ticket is None or not hmac.compare_digest(ticket.encode(), self._ticket.encode()):
            raise PermissionError("Credentials are lent to the processes of the run only.")


class CredentialLender:
    """Lends the credentials of a source: when it is created, and again from :meth:`lend_if_due` before they expire.

    Args:
        lend: sends a cloud and the fields of its credentials (None if there are none) to a broker, and returns when
            they are there.
        sources: this process's credentials for each cloud, or what may be lent of them.
    """

    def __init__(
        self, lend: Callable[[str, CredentialFields | None], None], sources: Mapping[str, CredentialSource]
    ) -> None:
        self._send = lend
        self._sources = sources
        self._next_at_s = dict.fromkeys(sources, 0.0)
        self.lend_if_due()

    def lend_if_due(self) -> None:
        """Lend again if :func:`raytrain.storage.credentials.ask_again_after_s` says so."""
        for cloud, next_at_s in self._next_at_s.items():
            if time.monotonic() >= next_at_s:
                self._next_at_s[cloud] = time.monotonic() + self._lend(cloud)

    def _lend(self, cloud: str) -> float:
        """Lend the credentials of a cloud; the seconds after which this is due again."""
        try:
            resolved = self._sources[cloud]()
        except Exception:
            # The credentials lent before may last until the source works again. If not, their users report the error.
            return _RETRY_AFTER_S
        self._send(cloud, resolved.fields() if resolved else None)
        return max(_MIN_WAIT_S, ask_again_after_s(resolved))
