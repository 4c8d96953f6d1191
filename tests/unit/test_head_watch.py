"""A line says that the head of the cluster does not answer, and one that it is back."""

from __future__ import annotations

import time
from itertools import chain, repeat

import pytest

from raytrain.launch.ray import cluster_watch
from raytrain.launch.ray.cluster_watch import HeadWatch
from raytrain.monitor.events import Event

WAIT_S = 60.0


@pytest.mark.not_quick
def test_a_head_that_goes_away_and_comes_back_is_told_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = chain([True, False, False, False], repeat(True))
    monkeypatch.setattr(cluster_watch, "ASK_HEAD_EVERY_S", 0.0)
    monkeypatch.setattr(cluster_watch, "head_answers", lambda timeout_s: next(answers))
    told: list[Event] = []
    watch = HeadWatch(told.append)
    deadline = time.monotonic() + WAIT_S
    while len(told) < 2 and time.monotonic() < deadline:
        watch.poll()
    watch.close()
    assert [event.kind for event in told] == ["head_silent", "head_back"]
