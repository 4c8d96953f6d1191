"""Notices that the head of the cluster does not answer. A run trains on without it, and nobody else would say so."""

from __future__ import annotations

from collections.abc import Callable

from ray.exceptions import RayError

from raytrain.launch.ray.private_api import WORKER
from raytrain.monitor.events import Event, HeadBack, HeadSilent
from raytrain.runs.background import Background, Throttle

_ASK_EVERY_S = 5.0
_ANSWER_WITHIN_S = 10.0


class HeadWatch:
    """Asks the head every few seconds, and calls ``event`` if it stops answering, and if it is back."""

    def __init__(self, event: Callable[[Event], None]) -> None:
        self._event = event
        self._ask = Background(head_answers)  # a question takes long if nobody answers
        self._throttle = Throttle()
        self._there = True

    def look(self) -> None:
        """Tell what the last question brought, and ask again."""
        if not self._throttle.due("ask", _ASK_EVERY_S):
            return
        answered = self._ask(_ANSWER_WITHIN_S)
        if answered is None or answered == self._there:
            return
        self._there = answered
        self._event(HeadBack() if answered else HeadSilent())

    def close(self) -> None:
        """Ask no more."""
        self._ask.close()


def head_answers(timeout_s: float) -> bool:
    """Whether the head answers within ``timeout_s``."""
    try:
        WORKER.load().gcs_client.check_alive([], timeout=timeout_s)
    except RayError:
        return False
    return True
