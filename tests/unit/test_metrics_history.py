"""The history is written during the run, continues after a resume, and survives storage failures."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain.monitor.run_reader import RunReader
from raytrain.runs import line_file, metrics_history
from raytrain.runs.line_file import LineFile
from raytrain.runs.metric_row import MetricRow, SkippedImage
from raytrain.runs.metrics_history import History, read_metrics, read_skipped
from raytrain.runs.stored_rows import read_rows
from raytrain.storage.folder import FolderStore
from raytrain.storage.open import open_store
from tests.helpers.folder_runs import folder_run, train_here
from tests.helpers.waiting import wait_for


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

    def get_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self.get(path)[start : start + num_bytes]

    def exists(self, path: str) -> bool:
        return path in self.objects

    def delete(self, path: str) -> None:
        self.objects.pop(path, None)

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


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return open_store(str(tmp_path / "first")) if request.param == "folder" else Bucket()


@pytest.mark.not_quick
def test_rows_are_written_during_the_run(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "REWRITE_MIN_S", 0.1)  # a real object is written anew after two seconds
    history = History(store)
    history.record(step_row(1))
    wait_for(lambda: steps(store) == [1])
    history.record(step_row(2))
    wait_for(lambda: steps(store) == [1, 2])
    history.close()


def test_close_writes_everything(store: Any) -> None:
    history = History(store)
    for step in range(1, 501):
        history.record(step_row(step))
    history.skip([SkippedImage("a.jpg", "truncated")])
    history.close()
    assert steps(store) == list(range(1, 501))
    assert read_skipped(store) == [SkippedImage("a.jpg", "truncated")]


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


def test_an_evaluation_that_will_be_repeated_is_dropped(store: Any) -> None:
    evaluation = MetricRow(kind="evaluation", step=20, epoch=1, metrics={"accuracy": 0.5})
    first = History(store)
    for row in (step_row(10), step_row(20), evaluation, step_row(30)):
        first.record(row)
    first.close()
    for measures_again, num_kept in ((False, 3), (True, 2)):
        second = History(store)
        second.rewind(20, measures_again=measures_again)
        second.close()
        assert len(read_metrics(store)) == len(second.sample.rows) == num_kept


def test_test_images_that_are_measured_again_after_a_kill_have_one_row(store: Any) -> None:
    for accuracy in (0.25, 0.5):
        history = History(store)
        history.rewind(20)
        for row in [] if accuracy > 0.25 else [step_row(10), step_row(20)]:
            history.record(row)
        history.record(MetricRow(kind="test", step=20, epoch=1, metrics={"accuracy": accuracy}))
        history.close()
        rows = read_metrics(store)
        assert [row.kind for row in rows] == ["step", "step", "test"] and len(history.sample.rows) == 3
        assert rows[-1].accuracy == accuracy


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


@pytest.mark.not_quick
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
        wait_for(lambda: history.error is not None)
        with pytest.raises(Exception, match="no space"):
            history.close()
    history.close()
    assert steps(store) == [1, 2]
    assert history.error is None


@contextlib.contextmanager
def broken(store: Any) -> Iterator[None]:
    """Make the store refuse writes, as if its disk were full."""
    if isinstance(store, Bucket):
        store.broken = True
        yield
        store.broken = False
        return

    def refuse(*arguments: Any) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("put", "append", "truncate"):
            patch.setattr(FolderStore, name, refuse)
        yield


def test_an_image_is_listed_once_however_often_it_is_skipped(store: Any) -> None:
    history = History(store)
    first, second = SkippedImage("a.jpg", "truncated"), SkippedImage("b.jpg", "empty")
    assert history.skip([first, first]) == [first]
    assert history.skip([first, second]) == [second]
    history.close()
    assert [image.key for image in read_skipped(store)] == ["a.jpg", "b.jpg"]


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


def record(store: Any, first: int, last: int) -> None:
    history = History(store)
    history.rewind(first - 1)
    for step in range(first, last + 1):
        history.record(step_row(step))
        if step % 10 == 0:
            history.flush()
    history.close()


def test_in_a_bucket_a_long_history_is_written_in_objects_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "OBJECT_BYTES", 1000)  # real ones, of 8 MiB, would take a run of days
    bucket: Any = Bucket()
    record(bucket, 1, 100)
    names = sorted(name for name in bucket.objects if name.startswith("metrics.jsonl"))
    assert names[:3] == ["metrics.jsonl", "metrics.jsonl.000001", "metrics.jsonl.000002"] and len(names) > 4
    assert max(len(bucket.objects[name]) for name in names) < 2000
    assert steps(bucket) == list(range(1, 101))
    assert [row.step for rows in read_rows(bucket) for row in rows] == list(range(1, 101))


@pytest.mark.parametrize("checkpoint", [0, 1, 37, 99])
def test_a_resumed_run_drops_exactly_what_follows_its_checkpoint(
    checkpoint: int, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Real objects and blocks, of 8 and 16 MiB, would take a run of days.
    monkeypatch.setattr(line_file, "OBJECT_BYTES", 1000)
    monkeypatch.setattr(line_file, "BLOCK_BYTES", 500)
    record(store, 1, 100)
    reader = RunReader(store, "first")
    seen = reader.snapshot()
    while reader.behind:
        seen = reader.snapshot(seen.cursor)
    history = History(store)
    history.rewind(checkpoint)
    history.flush()
    assert steps(store) == list(range(1, checkpoint + 1))
    history.record(step_row(checkpoint + 1, attempt=2))
    history.close()
    rows = read_metrics(store)
    assert [row.step for row in rows] == list(range(1, checkpoint + 2))
    assert [row.value("attempt") for row in rows[-2:]] == [None, 2][-len(rows) :]
    assert reader.snapshot(seen.cursor).first_row == 0, "who reads it begins anew"


@pytest.mark.parametrize("checkpoint", [0, 1, 37, 99, 100])
def test_a_long_history_that_was_copied_from_a_bucket_continues_in_a_folder(
    checkpoint: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_file, "OBJECT_BYTES", 1000)  # real ones, of 8 MiB, would take a run of days
    bucket: Any = Bucket()
    record(bucket, 1, 100)
    for name, content in bucket.objects.items():
        (tmp_path / name).write_bytes(content)
    history = History(open_store(str(tmp_path)))
    history.rewind(checkpoint)
    history.record(step_row(checkpoint + 1, attempt=2))
    history.close()
    problems: list[str] = []
    rows = read_metrics(open_store(str(tmp_path)), problems.append)
    assert [row.step for row in rows] == list(range(1, checkpoint + 2)) and not problems
    assert rows[-1].value("attempt") == 2


def test_what_a_failed_write_left_of_a_line_is_cut(tmp_path: Path) -> None:
    class Full(FolderStore):
        """Writes half of what it is given, and fails, as a disk that is full."""

        def append(self, path: str, data: bytes) -> None:
            super().append(path, data[: len(data) // 2])
            raise OSError("no space left on device")

    file = LineFile(Full(str(tmp_path)), "lines", lambda line: line, lambda line: line)
    file.extend([{"number": 1}])
    file.write()
    file.extend([{"number": 2}, {"number": 3}])
    with pytest.raises(OSError, match="no space"):
        file.write()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Full, "append", FolderStore.append)
        file.write()
    assert (tmp_path / "lines").read_text() == '{"number": 1}\n{"number": 2}\n{"number": 3}\n'


def test_a_cut_that_comes_while_storage_fails_is_made_later(store: Any) -> None:
    history = History(store)
    for step in range(1, 6):
        history.record(step_row(step))
    history.flush()
    with broken(store):
        history.record(step_row(6))
        history.rewind(4)
        history.record(step_row(5, attempt=2))
        history.record(step_row(6, attempt=2))
        history.rewind(5)
        with pytest.raises(Exception, match="no space"):
            history.flush()
        history.record(step_row(6, attempt=3))
    history.close()
    assert steps(store) == [1, 2, 3, 4, 5, 6]
    assert [row.value("attempt") for row in read_metrics(store)[-2:]] == [2, 3]


def test_a_history_of_any_length_takes_a_bounded_amount_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_history, "SAMPLE_SIZE", 100)  # the real one takes 20 times 32,768 rows
    history = History(open_store(str(tmp_path)))
    for step in range(1, 2001):
        history.record(step_row(step))
    assert history.sample.num_rows == 2000 and len(history.sample.rows) <= 300
    history.close()
    assert [row.step for rows in read_rows(open_store(str(tmp_path))) for row in rows] == list(range(1, 2001))


@pytest.mark.not_quick
def test_the_first_step_has_a_row_whatever_log_every_is(images: Path, tmp_path: Path) -> None:
    _, recorder = train_here(folder_run(images, tmp_path, "run", log_every=4, epochs=2))
    rows = [row for row in recorder.rows if row.kind == "step"]
    assert [row.step for row in rows] == [1, 4, 8, 10]
    assert all(row.loss is not None and row.accuracy is not None for row in rows)
    _, every = train_here(folder_run(images, tmp_path, "other", log_every=1, epochs=2))
    losses = [row.loss or 0 for row in every.rows if row.kind == "step"]
    assert [rows[0].loss, rows[1].loss] == pytest.approx([losses[0], sum(losses[1:4]) / 3])
