"""Files of a bucket that are kept on a disk of the machine."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raytrain import TrainConfig, UsageError
from raytrain.data.dataset import Dataset
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.data.shards import assign_shards, packed_manifest, shard_path
from raytrain.demo.s3_server import S3Server
from raytrain.loader.choose_cache import ImageCache, choose_cache
from raytrain.storage import locks
from raytrain.storage.disk_cache import DiskCache, kept_bytes
from raytrain.storage.open import open_store
from tests.helpers.faulty_s3 import faulty_s3

KB, MB = 1 << 10, 1 << 20
FORMAT = ImageFormat(ImageShape(8, 8, 3))


class Bucket:
    """Contents that each consist of one number; counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def get(self, disk: DiskCache, number: int, num_bytes: int = 10 * KB) -> None:
        content = bytes([number]) * num_bytes

        def fetch() -> bytes:
            self.fetched.append(number)
            return content

        assert disk.get(f"name {number}", fetch) == content


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def cache(folder: Path, limit_bytes: int = 1 << 30, started_s_ago: float = 1.0) -> DiskCache:
    return DiskCache(str(folder), limit_bytes, time.time() - started_s_ago)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_fetched_once_is_read_from_the_disk_by_later_runs_too(bucket: Bucket, tmp_path: Path) -> None:
    for _ in range(2):
        bucket.get(cache(tmp_path), 1)
        bucket.get(cache(tmp_path), 2)
    assert bucket.fetched == [1, 2]


def fetch_slowly(folder: str, begun: Event, may_end: Event) -> None:
    """In another process: fetch what ``Bucket`` calls 1, as long as the test says."""

    def fetch() -> bytes:
        begun.set()
        may_end.wait()
        return bytes([1]) * 10 * KB

    cache(Path(folder)).get("name 1", fetch)


@pytest.mark.parametrize(("ending", "fetched"), [("finishes", []), ("is killed", [1])])
@pytest.mark.not_quick
def test_what_another_process_fetches_is_waited_for(
    ending: str, fetched: list[int], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = get_context("spawn")
    begun, may_end, waits = spawn.Event(), spawn.Event(), threading.Event()
    other = spawn.Process(target=fetch_slowly, args=(str(tmp_path), begun, may_end))
    other.start()
    begun.wait()
    flock = locks.fcntl.flock

    def tell_of_waiting(number: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            waits.set()
        flock(number, how)

    monkeypatch.setattr(locks.fcntl, "flock", tell_of_waiting)
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(bucket.get, cache(tmp_path), 1)
        got.add_done_callback(lambda _: waits.set())
        waits.wait()
        may_end.set() if ending == "finishes" else other.kill()
        got.result()
    other.join()
    assert bucket.fetched == fetched
    assert not list(tmp_path.glob("unfinished-*"))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: b"x" + data[1:]])
def test_an_entry_that_a_crash_left_incomplete_is_fetched_again(
    damage: Callable[[bytes], bytes], bucket: Bucket, tmp_path: Path
) -> None:
    bucket.get(cache(tmp_path), 1)
    (entry,) = entries(tmp_path)
    entry.write_bytes(damage(entry.read_bytes()))
    bucket.get(cache(tmp_path), 1)
    bucket.get(cache(tmp_path), 1)
    assert bucket.fetched == [1, 1]


def test_files_that_no_run_has_used_for_longest_make_room_for_others(bucket: Bucket, tmp_path: Path) -> None:
    first, second = cache(tmp_path, started_s_ago=7200), cache(tmp_path, limit_bytes=10 * MB)
    for number in range(100):
        bucket.get(first, number, 100 * KB)
    hour_ago = time.time() - 3600
    for path in entries(tmp_path):
        os.utime(path, (hour_ago, hour_ago))
    for number in [*range(50), *range(100, 150)]:
        bucket.get(second, number, 100 * KB)
    bucket.fetched.clear()
    for number in range(50):
        bucket.get(second, number, 100 * KB)
    assert bucket.fetched == []
    assert kept_bytes(str(tmp_path)) <= 10 * MB


def test_a_run_keeps_a_part_of_what_does_not_fit(bucket: Bucket, tmp_path: Path) -> None:
    disk = cache(tmp_path, limit_bytes=5 * MB)
    for number in [*range(100)] * 2:
        bucket.get(disk, number, 100 * KB)
    assert 140 < len(bucket.fetched) < 170
    assert kept_bytes(str(tmp_path)) <= 5 * MB


def test_a_disk_that_refuses_is_done_without(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    bucket.get(cache(tmp_path / "file"), 1)

    def full(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    disk = cache(tmp_path / "cache")
    bucket.get(disk, 2)
    bucket.get(disk, 2)
    assert bucket.fetched == [1, 2, 2]
    assert entries(tmp_path / "cache") == []


def test_of_other_files_in_the_folder_none_is_touched(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "unfinished-killed").write_bytes(b"half of an image")
    others = [tmp_path / "thesis.tex", tmp_path / "holiday" / "beach.jpg", tmp_path / "ab" / "notes.txt"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 8 * MB)
    for path in [*others, tmp_path / "unfinished-killed"]:
        os.utime(path, (0, 0))
    bucket.get(cache(tmp_path, limit_bytes=2 * MB), 1)
    assert all(path.exists() for path in others)
    assert not (tmp_path / "unfinished-killed").exists()
    assert len(entries(tmp_path)) == 4


def test_what_another_user_wrote_is_never_read(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.get(cache(tmp_path / "mine"), 1)
    (tmp_path / "theirs").symlink_to(tmp_path / "mine")
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result([0, 0, 0, 0, 12345, 0, 0, 0, 0, 0]))
    bucket.get(cache(tmp_path / "theirs"), 1)
    assert bucket.fetched == [1, 1]


def put_image(url: str, path: str, value: int) -> None:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(data, "PNG")
    open_store(url).put(path, data.getvalue())


@pytest.fixture
def url(s3_url: str) -> str:
    """Twenty images in a bucket."""
    for number in range(20):
        put_image(s3_url, f"class-{number % 2}/{number}.png", number)
    return s3_url


def test_images_are_fetched_once_and_anew_if_they_were_replaced(
    url: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets: list[str] = []

    def count(request: Any, body: bytes) -> None:
        if request.command == "GET" and request.path.endswith(".png"):
            gets.append(request.path)

    with faulty_s3(s3.endpoint_url, interfere=count) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(url)
        reader = ImageReader(store.kept_on(cache(tmp_path)), *FORMAT)
        first, bad = reader.read(build_manifest(store))
        again, _ = reader.read(build_manifest(store))
        assert bad == {} and np.array_equal(first, again)
        assert len({*gets}) == 20 and len(gets) <= 23, "a tenth of slow requests and one more are sent a second time"
        gets.clear()
        put_image(url, "class-0/0.png", 99)
        assert 99 in reader.read(build_manifest(store))[0]
        assert len({*gets}) == 1


def choice(url: str, memory_bytes: int = 0, *, packed: bool = False, **options: Any) -> ImageCache:
    """What is kept of a run of three epochs with the images of ``url``."""
    store = open_store(url)
    manifest = build_manifest(store)
    if packed:
        shards = assign_shards(manifest)
        manifest = packed_manifest(manifest, shards, [shard_path(number, b"") for number in range(len(shards))], url)
    data = Dataset(store, store, manifest, manifest, FORMAT, FORMAT, (0.0,) * 3, (1.0,) * 3)
    given = TrainConfig(data=url, batch_size=2, **{"epochs": 3, **options})
    config = given.resolve(name="run", num_workers=1, device="cpu", mean=data.mean, std=data.std)
    return choose_cache(config, data, 0, memory_bytes)


def test_auto_takes_memory_if_the_images_fit_else_the_disk_if_they_are_used_again(url: str, tmp_path: Path) -> None:
    fits = choice(url, memory_bytes=1 << 30, cache_folder=str(tmp_path))
    assert fits.train and fits.validation and fits.disk is None
    too_large = choice(url, cache_folder=str(tmp_path))
    assert not too_large.train and too_large.disk is not None and too_large.disk.folder == str(tmp_path)
    assert choice(url, cache_folder=str(tmp_path), epochs=1).disk is None
    assert choice(url, cache_folder=str(tmp_path), epochs=1, packed=True).disk is not None
    assert choice(url, cache="none").disk is None


def test_images_of_a_folder_are_on_a_disk_already(images: Path, tmp_path: Path) -> None:
    assert choice(str(images), cache_folder=str(tmp_path)).disk is None
    with pytest.raises(UsageError, match=r"--cache is disk, and .* is a folder; that is for images in a bucket"):
        choice(str(images), cache="disk")


def test_a_disk_that_cannot_be_used_is_told_at_the_start(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file cannot be written \(File exists\); name another --cache-folder"):
        choice(url, cache="disk", cache_folder=str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"--cache is auto, and .*file cannot be written"):
        choice(url, cache_folder=str(tmp_path / "file"))
    monkeypatch.setattr("raytrain.loader.choose_cache.usable_bytes", lambda folder: -1)
    with pytest.raises(UsageError, match=r"has 0\.0 GB to spare; make room there, or name another --cache-folder"):
        choice(url, cache="disk", cache_folder=str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        choice(url, cache="disk", cache_folder=str(tmp_path))


def test_a_limit_that_was_given_counts(url: str, tmp_path: Path) -> None:
    found = choice(url, cache="disk", cache_folder=str(tmp_path), cache_limit_gb=0.5).disk
    assert found is not None and found.limit_bytes == 500_000_000
