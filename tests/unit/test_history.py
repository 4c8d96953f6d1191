"""The history is written during the run, continues after a resume, and survives storage failures."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain.runs.history import History, read_metrics
from raytrain.runs.json_lines import read_lines
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.skipped_images import SkippedImage
from raytrain.storage.open import open_store


class Bucket:
    """An in-memory object store with the methods that the history uses. If ``broken``, it refuses writes."""

    url = "s3://bucket/runs/first"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.num_puts = 0
        self.broken = False
        self.written = threading.Event()

    def get(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def put(self, path: str, data: bytes) -> None:
        if self.broken:
            raise OSError("no space left on device")
        self.num_puts += 1
        self.objects[path] = data
        self.written.set()


def step_row(step: int, **metrics: float) -> MetricRow:
    return MetricRow(kind="step", step=step, epoch=1, metrics={"loss": 1.0 / step, **metrics})


def steps(store: Any) -> list[int]:
    return [row.step for row in read_metrics(store)]


def until(condition: Callable[[], bool], deadline_s: float = 10) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return open_store(str(tmp_path / "first")) if request.param == "folder" else Bucket()


def test_rows_are_written_during_the_run(store: Any) -> None:
    history = History(store)
    history.record(step_row(1))
    until(lambda: steps(store) == [1])
    history.record(step_row(2))
    until(lambda: steps(store) == [1, 2])
    history.close()


def test_close_writes_everything(store: Any) -> None:
    history = History(store)
    for step in range(1, 501):
        history.record(step_row(step))
    history.skip([SkippedImage("a.jpg", "truncated")])
    history.close()
    assert steps(store) == list(range(1, 501))
    assert read_lines(store, "skipped.jsonl", dict) == [{"key": "a.jpg", "reason": "truncated"}]


def test_a_resumed_run_continues_the_history_after_its_checkpoint(store: Any) -> None:
    first = History(store)
    for step in (10, 20, 30):
        first.record(step_row(step))
    first.skip([SkippedImage("a.jpg", "truncated")])
    first.close()

    second = History(store)
    second.rewind(20)
    second.record(step_row(30, attempt=2))
    second.record(step_row(40))
    second.close()
    assert steps(store) == [10, 20, 30, 40]
    assert read_metrics(store)[2].value("attempt") == 2
    assert second.skipped_images == [SkippedImage("a.jpg", "truncated")]


def test_a_rewind_before_the_first_row_empties_the_history(store: Any) -> None:
    history = History(store)
    history.record(step_row(10))
    history.flush()
    history.rewind(0)
    history.close()
    assert steps(store) == []


def test_a_truncated_last_line_is_removed_before_new_lines_are_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1, "epoch": 1}\n{"kind": "st')
    history = History(open_store(str(tmp_path)))
    history.record(step_row(2))
    history.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_local_file_is_appended_and_an_object_is_rewritten_rarely(tmp_path: Path) -> None:
    folder = open_store(str(tmp_path))
    history = History(folder)
    history.record(step_row(1))
    history.flush()
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    history.record(step_row(2))
    history.close()
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode

    bucket = Bucket()
    history = History(bucket)  # pyright: ignore[reportArgumentType]
    for step in range(1, 51):
        history.record(step_row(step))
        bucket.written.wait(timeout=0.01)
        bucket.written.clear()
    assert bucket.num_puts < 5
    history.close()
    assert steps(bucket) == list(range(1, 51))


def test_rows_recorded_during_a_storage_failure_are_written_later(store: Any) -> None:
    history = History(store)
    history.record(step_row(1))
    history.flush()
    with broken(store):
        history.record(step_row(2))
        until(lambda: history.error is not None)
        with pytest.raises(Exception, match=r"no space|is a folder"):
            history.close()
    history.close()
    assert steps(store) == [1, 2]
    assert history.error is None


@contextlib.contextmanager
def broken(store: Any) -> Iterator[None]:
    """Make the store refuse metrics: the bucket fails, or a folder has the name of the metrics file."""
    if isinstance(store, Bucket):
        store.broken = True
        yield
        store.broken = False
    else:
        path = Path(store.url, "metrics.jsonl")
        path.unlink()
        path.mkdir()
        (path / "occupied").touch()
        yield
        (path / "occupied").unlink()
        path.rmdir()


def test_an_image_is_listed_once_however_often_it_is_skipped(store: Any) -> None:
    history = History(store)
    first, second = SkippedImage("a.jpg", "truncated"), SkippedImage("b.jpg", "empty")
    assert history.skip([first, first]) == [first]
    assert history.skip([first, second]) == [second]
    history.close()
    assert [row["key"] for row in read_lines(store, "skipped.jsonl", dict)] == ["a.jpg", "b.jpg"]


def test_every_line_is_valid_json_even_if_a_metric_is_nan(tmp_path: Path) -> None:
    history = History(open_store(str(tmp_path)))
    history.record(step_row(1, loss=float("nan"), grad=float("inf")))
    history.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "kind": "step",
        "step": 1,
        "epoch": 1,
        "elapsed_s": 0.0,
        "loss": None,
        "grad": None,
    }


def test_an_s3_bucket_keeps_the_history_of_two_attempts(s3_url: str) -> None:
    store = open_store(f"{s3_url}/runs/first")
    first = History(store)
    for step in (10, 20, 30):
        first.record(step_row(step))
    first.close()
    second = History(store)
    second.rewind(20)
    second.record(step_row(30))
    second.close()
    assert steps(store) == [10, 20, 30]
