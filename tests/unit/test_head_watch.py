"""A line says that the head of the cluster does not answer, and one that it is back."""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack, suppress
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import ray

from raytrain.launch.ray import cluster_watch, head_queries
from raytrain.launch.ray.cluster_watch import HeadWatch
from raytrain.launch.ray.head_queries import raylet_answers
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


def test_a_process_without_a_free_descriptor_takes_the_raylet_for_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_node_id=lambda: "1f")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(head_queries, "_raylet_socket", lambda node_id: "/tmp/no raylet")
    assert not raylet_answers()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(1))
        assert raylet_answers()
