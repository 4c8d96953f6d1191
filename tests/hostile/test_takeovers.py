"""An owner that is cut off in the middle of a write, and one that takes over: nothing of the new owner is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from raytrain.demo.s3_server import S3Server
from raytrain.runs.documents import run_store
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.ownership import claim_run
from raytrain.runs.stored_checkpoints import newest_checkpoint
from raytrain.storage.store import Store
from raytrain.training.checkpoint import read_checkpoint
from tests.helpers import old_owner
from tests.helpers.faulty_s3 import faulty_s3
from tests.helpers.stored_runs import contents


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEASE_S", "RENEW_EVERY_S", "POLL_EVERY_S"):
        monkeypatch.setattr(f"raytrain.runs.ownership.{name}", getattr(old_owner.ownership, name))
    old_owner.shorten_lease()


class Line:
    """The line of an owner to S3: it is cut when a request of this kind and number arrives, which is held back.

    When the line is restored, the request goes on, or is met by ``then``, and its owner tries again.
    """

    def __init__(self, wanted: str, number: int, then: str | None = None) -> None:
        self._wanted = wanted
        self._left = number
        self._then = then
        self._is_cut = False
        self.held, self.restored = threading.Event(), threading.Event()

    def interfere(self, request: BaseHTTPRequestHandler, body: bytes) -> str | None:
        if self.restored.is_set():
            return None
        if self._is_cut:
            return "reset"
        if self._wanted in f"{request.command} {request.path}":
            self._left -= 1
            if not self._left:
                self._is_cut = True
                self.held.set()
                self.restored.wait()
                return self._then
        return None


@contextmanager
def running(storage: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.helpers.old_owner", storage]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)  # pyright: ignore
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def train_on(store: Store) -> dict[str, bytes]:
    """Take the run over and train three steps from its newest checkpoint; the documents that are written then."""
    with claim_run(store, "run") as owner:
        found = contents(store)
        newest = newest_checkpoint(store)
        begin = read_checkpoint(store, newest).progress.step if newest else 0
        old_owner.write(owner, range(begin + 1, begin + 4), keep=3)
    return {path: content for path, content in contents(store).items() if found.get(path) != content}


def check_whole(store: Store, before: dict[str, bytes]) -> None:
    """Each document of the new owner is what it wrote, and each step is in the history once."""
    after = contents(store)
    assert {path: after.get(path) for path in before} == before
    assert newest_checkpoint(store) in before
    rows = read_metrics(store)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert [row.metrics["owner"] for row in rows[-3:]] == [2, 2, 2]


# The first write of a document creates it. In each step but the first, two deletions remove a checkpoint, and a third
# one the request to stop.
MOMENTS = [
    *((f"PUT /tests/{{}}/run/{path}", number) for path in ("metrics", "status", "checkpoints") for number in (1, 2)),
    *(("POST /tests?delete", number) for number in (2, 3, 4)),
    ("GET /tests/{}/run/claim.json", 9),
]


QUICK = {("PUT /tests/{}/run/metrics", 2), ("POST /tests?delete", 4)}


@pytest.mark.parametrize(
    ("wanted", "number"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in MOMENTS]
)
def test_what_an_owner_had_on_its_way_harms_nothing_of_the_next_one(wanted: str, number: int, moto_url: str) -> None:
    line = Line(wanted.format(moto_url.rpartition("/")[2]), number)
    check_takeover(line, os.environ["AWS_ENDPOINT_URL"], moto_url)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["metrics", "status", "checkpoints"])
def test_a_server_without_conditions_gets_no_second_try_of_an_owner_that_was_replaced(
    wanted: str, s3: S3Server, s3_url: str
) -> None:
    line = Line(f"PUT /tests/{s3_url.rpartition('/')[2]}/run/{wanted}", 2, then="reset")
    check_takeover(line, s3.endpoint_url, s3_url)


def check_takeover(line: Line, endpoint_url: str, url: str) -> None:
    """Train on while the line holds what the old owner has sent, let that through, and look for harm."""
    store = run_store(url, "run")
    with (
        faulty_s3(endpoint_url, interfere=line.interfere) as proxy,
        running(url, AWS_ENDPOINT_URL=proxy.url) as old,
    ):
        assert line.held.wait(60)
        before = train_on(store)
        line.restored.set()
        assert "took over the run" in last_word(old)
    check_whole(store, before)


def last_word(old: subprocess.Popen[str]) -> str:
    assert old.stdout is not None
    return old.stdout.read()
