"""Storage over a faulty network: all data arrives without a flood of retries, and changed objects are detected."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.demo.demo import render_digits
from raytrain.demo.s3_server import S3Server
from raytrain.runs.ownership import claim_run
from raytrain.storage import bucket_client
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.open import open_store
from raytrain.storage.retries_and_hedges import MAX_THREADS
from raytrain.storage.store import ObjectChanged, Store
from tests.helpers.faulty_s3 import FAULTS, faulty_s3

NUM_OBJECTS = 300


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests time out after half a second."""
    monkeypatch.setitem(bucket_client.TIMEOUTS, "read_timeout", timedelta(seconds=0.5))


def content(number: int) -> bytes:
    return bytes([number % 256]) * (1000 + number)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize(
    ("fraction", "max_requests_per_object"), [(0.05, 1.2), pytest.param(0.5, 3.0, marks=pytest.mark.slow)]
)
def test_all_data_arrives_despite_faults_and_without_a_flood_of_retries(
    s3: S3Server, s3_url: str, fraction: float, max_requests_per_object: float
) -> None:
    direct = open_store(s3_url)
    paths = [f"{number % 5}/{number:03d}" for number in range(NUM_OBJECTS)]
    for number, path in enumerate(paths):
        direct.put(path, content(number))
    with faulty_s3(s3.endpoint_url, fraction) as proxy:
        store = open_store(s3_url, cloud=S3(proxy.url, "us-east-1"))
        assert store.get_many(paths) == [content(number) for number in range(NUM_OBJECTS)]
        assert all(proxy.outcomes[fault] for fault in FAULTS)
        assert proxy.num_requests <= max_requests_per_object * NUM_OBJECTS
        assert proxy.max_at_once <= MAX_THREADS
        assert sorted(found.path for found in store.list()) == sorted(paths)
        for number, size_bytes in enumerate((10, 1_000_000, 12_000_000)):  # The last is a multipart upload.
            store.put(f"written/{number}", bytes(size_bytes))
            assert direct.get(f"written/{number}") == bytes(size_bytes)
        assert not store.exists("nowhere")
        store.delete("written/2")
        assert not direct.exists("written/2")


class SlowLine:
    """Delays each answer to an upload, and counts the bytes of all, and the parts, that are sent at the same time."""

    def __init__(self, part_s: float = 0.1, small_s: float = 0.1) -> None:
        self._seconds = {True: part_s, False: small_s}
        self._at_once = Counter[bool]()  # bytes by whether they are a part of a large upload
        self.max_parts = self.max_small_bytes = 0
        self._lock = threading.Lock()

    def interfere(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        is_part = "partNumber" in request.path
        with self._lock:
            self._at_once[is_part] += len(body)
            self.max_small_bytes = max(self.max_small_bytes, self._at_once[False])
            self.max_parts = max(self.max_parts, self._at_once[True] // (5 << 20))
        time.sleep(self._seconds[is_part])
        with self._lock:
            self._at_once[is_part] -= len(body)


def put_small(store: Store, num: int) -> None:
    """Write ``num`` objects of 1 MiB, up to twenty at a time."""
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda number: store.put(f"small/{number}", bytes(1 << 20)), range(num)))
    assert len(list(store.list("small"))) == num


@pytest.mark.usefixtures("short_timeout")
def test_uploads_over_a_slow_line_arrive(s3: S3Server, s3_url: str) -> None:
    line, direct = SlowLine(part_s=1.0), open_store(s3_url)
    with faulty_s3(s3.endpoint_url, interfere=line.interfere) as proxy:
        store = open_store(s3_url, cloud=S3(proxy.url, "us-east-1"))
        store.put("large", bytes(12 << 20))  # Each part takes twice as long as the answer to another request may.
        assert direct.get("large") == bytes(12 << 20)
        put_small(store, 20)
        assert 2 << 20 <= line.max_small_bytes <= 5 << 20


@pytest.mark.usefixtures("short_timeout")
def test_a_large_document_of_an_owner_arrives_over_a_slow_line(s3: S3Server, s3_url: str) -> None:
    def carry_slowly(request: BaseHTTPRequestHandler, body: bytes) -> None:
        time.sleep(1.0 if len(body) > 1 << 20 else 0.0)  # twice as long as the answer to another request may take

    direct, document = open_store(s3_url), bytes(8 << 20)
    with faulty_s3(s3.endpoint_url, interfere=carry_slowly) as proxy, claim_run(direct, "run") as owner:
        store = open_store(s3_url, cloud=S3(proxy.url, "us-east-1")).guarded(owner.claim)
        store.fail_fast().put("metrics.jsonl", document)
    assert direct.get("metrics.jsonl") == document


def test_uploads_over_a_fast_line_do_not_wait_for_each_other(s3: S3Server, s3_url: str) -> None:
    line = SlowLine()
    with faulty_s3(s3.endpoint_url, interfere=line.interfere) as proxy:
        store = open_store(s3_url, cloud=S3(proxy.url, "us-east-1"))
        put_small(store, 40)
        assert line.max_small_bytes > 10 << 20
        store.put("large", bytes(40 << 20))
        assert line.max_parts > 4


@pytest.mark.usefixtures("short_timeout")
def test_real_images_are_read_despite_faults(s3: S3Server, s3_url: str, tmp_path: Path) -> None:
    folder = open_store(str(render_digits(tmp_path, num_images=100) / "train"))
    direct = open_store(s3_url)
    for found in folder.list():
        direct.put(found.path, folder.get(found.path))
    wanted, shape = build_manifest(direct), ImageShape(28, 28, 1)
    with faulty_s3(s3.endpoint_url, 0.3, seed=1) as proxy:
        images, bad = ImageReader(open_store(s3_url, cloud=S3(proxy.url, "us-east-1")), shape).read(wanted)
    assert bad == {} and (images == ImageReader(folder, shape).read(build_manifest(folder))[0]).all()


# Objects that change after they are listed.


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("s3_url"))


def test_an_object_replaced_after_its_listing_is_detected(store: Store) -> None:
    for path in "abc":
        store.put(path, path.encode())
    etags = {found.path: found.etag for found in store.list()}
    store.put("b", b"longer than before")
    store.delete("c")
    got = store.get_many(list("abc"), [etags[path] for path in "abc"])
    assert got[0] == b"a" and isinstance(got[1], ObjectChanged) and isinstance(got[2], FileNotFoundError)
    assert store.get("b") == b"longer than before"


def test_a_replaced_object_of_the_same_length_is_detected_in_s3(s3_url: str) -> None:
    store = open_store(s3_url)
    store.put("a", b"one")
    (listed,) = store.list()
    assert store.get("a", listed.etag) == b"one"
    store.put("a", b"two")
    with pytest.raises(ObjectChanged, match=f"{s3_url}/a"):
        store.get("a", listed.etag)


def test_copies_of_a_folder_on_other_machines_are_the_same_files(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a", b"one")
    (listed,) = store.list()
    store.put("a", b"two")  # A copy has another modification time, which is not compared.
    assert store.get("a", listed.etag) == b"two"


def test_deleted_and_replaced_images_are_reported_and_the_others_are_correct(store: Store, tmp_path: Path) -> None:
    folder = open_store(str(render_digits(tmp_path / "digits", num_images=60) / "train"))
    for found in folder.list():
        store.put(found.path, folder.get(found.path))
    manifest, shape = build_manifest(store), ImageShape(28, 28, 1)
    before, _ = ImageReader(store, shape).read(manifest)
    keys = manifest.keys.to_pylist()
    store.delete(str(keys[3]))
    store.put(str(keys[7]), b"something else")
    after, bad = ImageReader(store, shape).read(manifest)
    assert bad == {3: "the object is gone", 7: "the object was replaced after it was listed"}
    others = np.delete(np.arange(len(keys)), [3, 7])
    assert (after[others] == before[others]).all() and not after[[3, 7]].any()
