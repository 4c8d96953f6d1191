"""The driver's credentials for processes that have none of their own.

The driver sends its credentials with a :class:`CredentialLender` to a :class:`CredentialBroker` in another process.
How they travel is up to the caller; they must stay in memory. Whoever asks for them shows a ticket, which the driver
gives to its own processes only: others may be able to call the same broker.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Mapping

from raytrain.storage.credentials import (
    BucketCredentials,
    CredentialFields,
    CredentialSource,
    ask_again_after_s,
    credentials_of_fields,
)

_MIN_WAIT_S = 1.0
_RETRY_AFTER_S = 5.0
_RENEWED_WITHIN_S = 10.0  # after the driver's machine has slept: it polls twice a second, and its source takes a while


class CredentialBroker:
    """Holds the credentials that the driver has lent for each cloud, in the memory of this process.

    A caller that asks for expired credentials waits up to 10 s for new ones: after the machine has slept, the driver
    lends again. If it does not, the credentials were revoked or their source has failed, and from then on nobody waits
    for them. Otherwise each request of a store would wait, and a run that must end would take hours to do so.
    """

    def __init__(self) -> None:
        self._lent: dict[str, BucketCredentials | None] = {}
        self._given_up: dict[str, BucketCredentials | None] = {}  # expired ones that were not replaced within 10 s
        self._changed = threading.Condition()
        self._ticket: str | None = None

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        """Replace the credentials of a cloud by those with these ``fields``, or by none.

        The first call decides on the ticket. Raises PermissionError if a later one has another ticket.
        """
        self._ticket = self._ticket or ticket
        self._check(ticket)
        with self._changed:
            self._lent[cloud] = credentials_of_fields(cloud, fields)
            self._changed.notify_all()

    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        """Return the fields of a cloud's credentials, for another process; None if none are lent.

        If they have expired, wait as :meth:`source` does. Raises PermissionError if the ticket is wrong.
        """
        self._check(ticket)
        lent = self.source(cloud)
        return lent.fields() if lent else None

    def source(self, cloud: str) -> BucketCredentials | None:
        """Return the lent credentials of a cloud, for stores in this process; None if none are lent.

        If they have expired, wait up to 10 s for the lender to renew them, and return the expired ones if it does not.
        """

        def needs_no_wait() -> bool:
            lent = self._lent.get(cloud)
            return lent is None or not lent.have_expired or lent is self._given_up.get(cloud)

        with self._changed:
            if not self._changed.wait_for(needs_no_wait, _RENEWED_WITHIN_S):
                self._given_up[cloud] = self._lent.get(cloud)
                self._changed.notify_all()  # the threads that wait for the same credentials need not wait either
            return self._lent.get(cloud)

    def _check(self, ticket: str) -> None:
        """Raise PermissionError unless ``ticket`` is that of the first loan."""
        if self._ticket is None or not hmac.compare_digest(ticket.encode(), self._ticket.encode()):
            raise PermissionError("Credentials are lent to the processes of the run only.")


class CredentialLender:
    """Lends the credentials of each cloud's source to other processes, at once, and again before they expire.

    ``lend`` is called with the name of a cloud and its credentials, or None if the source has none: by the constructor,
    and by :meth:`lend_if_due`, which whoever makes a lender has to call every few seconds.
    """

    def __init__(
        self, lend: Callable[[str, CredentialFields | None], None], sources: Mapping[str, CredentialSource]
    ) -> None:
        self._lend = lend
        self._sources = sources
        self._next_at_s = dict.fromkeys(sources, 0.0)
        self._lent: dict[str, BucketCredentials | None] = {}
        self.lend_if_due()

    def lend_if_due(self) -> None:
        """Lend anew the credentials whose source is due by :func:`raytrain.storage.credentials.ask_again_after_s`.

        Those that have expired are always due. A source that fails is asked again after five seconds.
        """
        for cloud, next_at_s in self._next_at_s.items():
            # Credentials may expire before they are due if the machine has slept: its monotonic clock stood still.
            lent = self._lent.get(cloud)
            if time.monotonic() < next_at_s and not (lent and lent.have_expired):
                continue
            try:
                credentials = self._lent[cloud] = self._sources[cloud]()
            except Exception:
                # The credentials lent before may last until the source works again. If not, requests fail with a
                # sentence.
                self._next_at_s[cloud] = time.monotonic() + _RETRY_AFTER_S
                self._lent[cloud] = None
                continue
            self._lend(cloud, credentials.fields() if credentials else None)
            self._next_at_s[cloud] = time.monotonic() + max(_MIN_WAIT_S, ask_again_after_s(credentials))
