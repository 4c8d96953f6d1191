"""Lend the driver's credentials to processes on nodes that have no role of their own.

The driver sends its credentials with a :class:`CredentialLender` to a :class:`CredentialBroker` in another process.
How they travel is up to the caller; they must stay in memory. Whoever asks for them shows a ticket, which the driver
gives to its own processes only: others may be able to call the same broker.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from raytrain.storage.credentials import CredentialFields, Credentials, CredentialSource, ask_again_after_s

_MIN_WAIT_S = 1.0
_RETRY_AFTER_S = 5.0


class CredentialBroker:
    """Holds the credentials that the driver lent last, in the memory of this process."""

    def __init__(self) -> None:
        self._lent: Credentials | None = None
        self._ticket: str | None = None

    def lend(self, ticket: str, fields: CredentialFields | None) -> None:
        """Replace the lent credentials; None if the driver has none.

        The first ticket is the one that counts. Raises PermissionError for another one.
        """
        self._ticket = self._ticket or ticket
        self._check(ticket)
        self._lent = Credentials(*fields) if fields else None

    def credentials(self, ticket: str) -> CredentialFields | None:
        """Return the fields of the lent credentials, for another process; None if the driver has none.

        Raises PermissionError if nothing was lent with this ticket.
        """
        self._check(ticket)
        return self._lent.fields() if self._lent else None

    def source(self) -> Credentials | None:
        """Return the lent credentials: a :class:`CredentialSource` for stores in this process."""
        return self._lent

    def _check(self, ticket: str) -> None:
        if self._ticket is None or not hmac.compare_digest(ticket.encode(), self._ticket.encode()):
            raise PermissionError("Credentials are lent to the processes of the run only.")


class CredentialLender:
    """Lends the credentials of a source: when it is created, and again from :meth:`lend_if_due` before they expire.

    Args:
        lend: sends the fields of the credentials (None if there are none) to a broker, and returns when they are there.
        source: this process's credentials, or what may be lent of them.
    """

    def __init__(self, lend: Callable[[CredentialFields | None], None], source: CredentialSource) -> None:
        self._send = lend
        self._source = source
        self._next_at_s = 0.0
        self._lend()

    def lend_if_due(self) -> None:
        """Lend again if :func:`raytrain.storage.credentials.ask_again_after_s` says so."""
        if time.monotonic() >= self._next_at_s:
            self._lend()

    def _lend(self) -> None:
        try:
            resolved = self._source()
        except Exception:
            # The credentials lent before may last until the source works again. If not, their users report the error.
            self._next_at_s = time.monotonic() + _RETRY_AFTER_S
            return
        self._send(resolved.fields() if resolved else None)
        self._next_at_s = time.monotonic() + max(_MIN_WAIT_S, ask_again_after_s(resolved))
