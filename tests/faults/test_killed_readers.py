"""A run loses no samples if processes that read images are killed, or the one that starts them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import psutil
import pytest

import raytrain
from raytrain.demo.s3_server import S3Server
from tests.helpers.faulty_s3 import faulty_s3
from tests.helpers.small_runs import assert_same_weights, config, make_images

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

OPTIONS = {"batch_size": 200, "epochs": 2}
FEEDER = "ray::StreamFeeder"
KILLS = {"memory": {"ray::read_block": 4}, "none": {"ray::read_block": 2, "ray::MapBatches": 2, FEEDER: 1}}
"""Kills for each kind of process: single tasks fill a cache, and start a stream; Ray Data reads the rest of it."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More images than are read at the start of a run."""
    folder = tmp_path_factory.mktemp("s3") / "bucket"
    folder.mkdir()
    return make_images(folder, 5001)


@pytest.fixture(scope="module")
def server(bucket: Path) -> Iterator[S3Server]:
    with S3Server(bucket.parent) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, bucket: Path, tmp_path_factory: pytest.TempPathFactory) -> raytrain.TrainResult:
    return raytrain.train(config(bucket, tmp_path_factory.mktemp("undisturbed"), **OPTIONS))


class Killer:
    """Kills the client of every 50th request, until each kind of process was killed as often as ``left`` says.

    At last it kills the process that starts the others.
    """

    def __init__(self, kills: dict[str, int]) -> None:
        self.left = Counter(kills)
        self._num_requests = 0
        self._lock = threading.Lock()

    def interfere(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        with self._lock:
            self._num_requests += 1
            if self._num_requests % 50 == 0 and self.left.total():
                self._kill(request.client_address[1])

    def _kill(self, port: int) -> None:
        for found in psutil.net_connections("tcp"):
            if found.pid and found.laddr and found.laddr.port == port:
                client = psutil.Process(found.pid)
                siblings = client.parents()[0].children() if +self.left == {FEEDER: 1} else []
                for process in (client, *siblings):
                    title = next(iter(process.cmdline()), "")
                    for kind in [kind for kind, left in self.left.items() if left > 0 and title.startswith(kind)]:
                        self.left[kind] -= 1
                        process.kill()


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_killed_readers_lose_no_samples(
    cache: str,
    undisturbed: raytrain.TrainResult,
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killer = Killer(KILLS[cache])
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with faulty_s3(server.endpoint_url, interfere=killer.interfere) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        result = raytrain.train(config("s3://bucket", tmp_path, cache=cache, trace=True, **OPTIONS))
    assert killer.left.total() == 0, killer.left
    assert (result.status, result.samples_seen, result.num_skipped) == ("finished", undisturbed.samples_seen, 0)
    assert_same_weights(result, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
