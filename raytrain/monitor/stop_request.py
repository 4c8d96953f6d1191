"""Requests to stop a run, by a document in its storage, by signals such as Ctrl-C, or by a call in its own process."""

from __future__ import annotations

import errno
import logging
import select
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from time import monotonic
from types import FrameType
from typing import Any, TextIO

from raytrain.errors import UsageError
from raytrain.runs.documents import STATUS, STOP_REQUEST, open_run, read_json, write_json
from raytrain.runs.outcome import StopReason
from raytrain.runs.ownership import read_claim
from raytrain.runs.status import WATCH_S, parse_status, stored_status, watch_for_life
from raytrain.storage.store import Store

_log = logging.getLogger(__name__)
_REQUESTED_AT = "requested_at"  # in the document of a request: when it was written
_ONE_STOP_S = 1.0  # the shell, `uv run` and `ray job stop` each send or forward a signal for one Ctrl-C


def request_stop(storage: str, name: str, reason: StopReason) -> None:
    """Write a stop request into the storage of a run. Raise UsageError if there is no such run, or it does not train.

    A run whose status is old is watched for some seconds: perhaps only the clock of its machine is wrong. So is one
    that has ended, but has an owner: a resume may be starting its workers. If nothing is heard of it, UsageError is
    raised, too, but the request stays in storage. Raises StorageError if that is out of reach.
    """
    store = open_run(storage, name)
    # ``stored`` is what the run wrote last; ``status`` is "interrupted" if that says "running" but is old.
    document = read_json(store, STATUS)
    stored, status = stored_status(document), parse_status(document)
    claim = read_claim(store)
    may_train = (stored.active and not stored.is_gone) or (claim is not None and claim.may_be_alive)
    if may_train:
        # The time makes each request another document: an attempt that begins drops the one that was there before it.
        now = datetime.now(timezone.utc).isoformat()
        write_json(store, STOP_REQUEST, {**reason.to_json(), _REQUESTED_AT: now})
    if status.active:
        return

    # The request remains in storage: a machine that sleeps may continue later.
    unheard = ""
    if may_train:
        _log.warning("waiting up to %.0f s to see whether a process trains run %r, or is starting to", WATCH_S, name)
        if watch_for_life(store):
            return
        unheard = f", and has written nothing for {WATCH_S:.0f} s; if it still trains, it will find the request to stop"
    resume = "" if status.status == "finished" else "; resume it with --resume"
    raise UsageError(f"Run {name!r} is not training: it is {status.status} at step {status.step:,}{unheard}{resume}.")


def read_stop_request(store: Store) -> StopReason | None:
    """Return the stop request in a run's storage; None without one, or if it is damaged."""
    document = read_json(store, STOP_REQUEST)
    document.pop(_REQUESTED_AT, None)
    with suppress(ValueError):
        return StopReason.from_json(document)
    return None


def has_lost_reader(output: TextIO) -> bool:
    """Return True if ``output`` is a pipe whose reader has gone."""
    with suppress(OSError, ValueError):  # it is no file, or closed
        # Ask for no event, and do not wait: POLLERR and POLLHUP, which say that the reader has gone, come unasked.
        poll = select.poll()
        poll.register(output, 0)
        return bool(poll.poll(0))
    return False


class StopSignals:
    """Requests to stop a run, by a signal or from this process. The first one counts: see :attr:`stop_request`.

    While this is open, the first SIGINT, SIGTERM or SIGHUP asks the run to stop with a checkpoint. Signals within a
    second of the first one count as the same. A later SIGINT or SIGTERM raises KeyboardInterrupt. SIGHUP, which a
    terminal sends when it is closed, stays ignored if it was, as with ``nohup``. If this is opened in another thread
    than the main one, where Python allows no signal handlers, only :meth:`request_stop` sets a request.
    """

    stop_request: StopReason | None = None
    """Why the run should stop; None if nobody has asked for that."""
    _signalled_at_s: float | None = None  # the time of the first signal

    def request_stop(self, request: StopReason) -> None:
        """Ask the run to stop with a checkpoint; only the first request counts. May be called from any thread."""
        self.stop_request = self.stop_request or request

    def __enter__(self) -> StopSignals:
        self._before: dict[int, Any] = {}
        # Keep the present handlers, which are restored at the end.
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def outlive_terminal(self) -> Generator[None]:
        """Ignore the exceptions of a view whose output is gone, so that the run still ends with a checkpoint.

        An output that fails is always ignored: EIO of a closed terminal, which also sends SIGHUP, and ENOSPC of a full
        disk, which need not be the disk of the run. A closed pipe is ignored once the run is to stop. If it is the
        standard output, as after `| head`, the run is asked to stop here. A view may turn a closed pipe into
        SystemExit, as rich does. All other exceptions are raised.
        """
        try:
            yield
        except (OSError, SystemExit) as error:
            if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOSPC):
                return
            # A closed pipe: ask the run to stop if it was the standard output, and ignore it if the run is to stop.
            if self.stop_request is None and isinstance(error, BrokenPipeError) and has_lost_reader(sys.stdout):
                _log.warning("Nobody reads the output any more, so the run stops with a checkpoint.")
                self.request_stop(StopReason("signal", "SIGPIPE"))
            if self.stop_request is None or not isinstance(error, (BrokenPipeError, SystemExit)):
                raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal as a request to stop; raise KeyboardInterrupt for a second one."""
        # Only a signal well after the first one is a second Ctrl-C. SIGHUP never is: a user who closes the terminal of
        # a stopping run does not want to lose its checkpoint.
        if self._signalled_at_s is None:
            self._signalled_at_s = monotonic()
        elif monotonic() - self._signalled_at_s >= _ONE_STOP_S and number != signal.SIGHUP:
            raise KeyboardInterrupt
        self.request_stop(StopReason("signal", signal.Signals(number).name))
