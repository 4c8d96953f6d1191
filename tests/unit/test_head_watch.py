"""Lines say that the head of the cluster does not answer, that it is back, and that the raylet has died."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import ray

from raytrain.launch.ray import cluster_watch, head_queries
from raytrain.launch.ray.cluster_watch import HeadWatch, RayletWatch
from raytrain.launch.ray.head_queries import raylet_answers
from raytrain.monitor.events import Event
from tests.helpers.waiting import wait_for

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


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket on which a raylet listens."""
    here = SimpleNamespace(get_node_id=lambda: "1f")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        path = f"{folder}/raylet"
        monkeypatch.setattr(head_queries, "_raylet_socket", lambda node_id: path)
        listening.bind(path)
        listening.listen()
        yield listening


@pytest.mark.not_quick
def test_a_start_that_waits_for_a_lost_head_and_a_raylet_that_dies_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raylet: socket.socket
) -> None:
    monkeypatch.setattr(cluster_watch, "head_answers", lambda timeout_s: False)
    with closing(RayletWatch(is_own=False)) as watch:
        connection = raylet.accept()[0]
        wait_for(lambda: bool(caplog.messages), "no warning of the head")
        watch.note_started()
        raylet.close()
        connection.close()  # now nobody listens
        wait_for(lambda: len(caplog.messages) > 1, "no warning of the raylet")
    of_head, of_raylet = caplog.messages
    assert "head of the cluster does not answer" in of_head
    assert "raylet, has died" in of_raylet and "`ray start`" in of_raylet


@pytest.mark.not_quick
def test_a_raylet_that_ends_the_connection_alone_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raylet: socket.socket
) -> None:
    monkeypatch.setattr(cluster_watch, "head_answers", lambda timeout_s: True)
    with closing(RayletWatch(is_own=False)):
        raylet.accept()[0].close()
        raylet.accept()[0].close()  # it is asked once whether it lives
    assert not caplog.messages


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
