"""Whole training runs on Ray, and the documents that they write to storage."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import raytrain
from raytrain import UsageError
from raytrain.cli.commands.training import new
from raytrain.demo.s3_server import S3Server
from raytrain.inference import trained_run
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.documents import run_store
from raytrain.runs.logs import DRIVER, LogReader, worker_log
from raytrain.runs.outcome import StopReason
from raytrain.runs.records import read_run
from raytrain.storage.open import open_store
from tests.helpers.folder_runs import folder_run, largest_difference, train_runs
from tests.helpers.small_runs import (
    CLASSES,
    NUM_IMAGES,
    assert_same_weights,
    check_keys,
    config,
    loop_with,
    put_images,
    weights,
)
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_run_writes_all_documents_to_its_folder(undisturbed: raytrain.TrainResult) -> None:
    folder = Path(undisturbed.run_dir)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == undisturbed.summary()
    assert (summary["status"], summary["steps"], summary["epochs"], summary["samples_seen"]) == ("finished", 20, 4, 324)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert [row["samples_seen"] for row in steps][:6] == [20, 40, 60, 80, 81, 101]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert set(steps[0]) >= {"epoch", "accuracy", "learning_rate", "images_per_s", "data_wait_fraction", "elapsed_s"}
    assert [row["epoch"] for row in rows if row["kind"] == "evaluation"] == [1, 2, 3, 4]
    assert read_run(str(folder.parent), "run").status.status == "finished"
    assert json.loads((folder / "classes.json").read_text()) == list(CLASSES)
    assert pyarrow.parquet.read_table(folder / "manifest.parquet").num_rows == 81
    assert undisturbed.validation_accuracy is not None and undisturbed.validation_accuracy >= 0.8


@pytest.mark.slow
def test_streaming_on_one_worker_ends_with_the_same_weights_as_the_cache_on_two(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    batches_from_stream = raytrain.train(config(images, tmp_path, workers=1, cache="none"))
    assert_same_weights(batches_from_stream, undisturbed)


def wait_for_stop_in_step_8(run: raytrain.Run, batch: raytrain.Batch) -> None:
    if run.rank == 0 and batch.step == 7:
        wait_for(run.reporter.stop_requested)


@pytest.mark.slow
def test_random_crops_of_the_originals_are_those_of_a_run_without_ray(images: Path, tmp_path: Path) -> None:
    (alone,) = train_runs(1, folder_run(images, tmp_path, "alone", random_resized_crop=True, image_size=(9, 9)))
    streamed = folder_run(images, tmp_path, "streamed", random_resized_crop=True, image_size=(9, 9))
    assert largest_difference(weights(raytrain.train(streamed.config)), alone) < 1e-10


@pytest.mark.slow
def test_a_stopped_run_in_s3_resumed_without_ray_on_fewer_workers_ends_with_the_weights_of_one_in_a_folder(
    undisturbed: raytrain.TrainResult, s3_url: str, images: Path
) -> None:
    put_images(images, open_store(f"{s3_url}/images"))
    storage = f"{s3_url}/runs"
    options = config(f"{s3_url}/images", storage, cache="none")

    def stop_in_step_8(snapshot: Any) -> None:
        if snapshot.step >= 6 and snapshot.stop_request is None:
            request_stop(storage, "run", StopReason("caller", "enough"))

    stopped = raytrain.train(options, loop=partial(loop_with, before_step=wait_for_stop_in_step_8), view=stop_in_step_8)
    assert (stopped.status, stopped.stop_reason) == ("stopped", StopReason("caller", "enough"))
    assert stopped.run_dir == f"{storage}/run" and read_run(storage, "run").status.step == stopped.steps
    assert 8 <= stopped.steps <= 9
    resumed = raytrain.train(dataclasses.replace(options, resume=True, workers=1, cache="auto", backend="local"))
    assert (resumed.status, resumed.samples_seen) == ("finished", 324)
    assert_same_weights(resumed, undisturbed)
    steps = [row.step for row in read_run(storage, "run").metrics if row.kind == "step"]
    assert steps == list(range(1, 21))


@pytest.mark.slow
def test_a_run_in_the_background_can_be_watched_and_stopped(images: Path, tmp_path: Path) -> None:
    trained = threading.Event()
    handle = raytrain.start(
        config(images, tmp_path, epochs=1000), view=lambda snapshot: trained.set() if snapshot.step > 4 else None
    )
    assert trained.wait(200)
    assert handle.snapshot is not None and handle.snapshot.status == "running" and not handle.done
    handle.stop("seen enough")
    result = handle.result(100)
    assert (result.status, result.stop_reason) == ("stopped", StopReason("caller", "seen enough"))
    assert handle.done and 4 < result.steps < 5000


@pytest.mark.slow
def test_a_loop_in_a_file_trains_and_passes_an_audit(images: Path, tmp_path: Path) -> None:
    new(str(tmp_path / "project"))
    loop = tmp_path / "project" / "loop.py"
    loop.write_text(loop.read_text().replace("Conv2d(1, ", "Conv2d(3, "))
    result = raytrain.train(
        config(images, tmp_path, loop=f"{loop}:train", precision="float32", epochs=2, accumulate=2, trace=True)
    )
    assert (result.status, result.steps) == ("finished", 10)
    assert raytrain.audit("run", storage=str(tmp_path)).clean


def meet_before_the_first_step(run: raytrain.Run) -> None:
    from ray.train.collective import barrier

    barrier()
    loop_with(run, before_step=check_keys)


@pytest.mark.slow
def test_a_loop_may_use_the_barrier_of_ray_train_before_its_first_step(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    assert_same_weights(raytrain.train(config(images, tmp_path), loop=meet_before_the_first_step), undisturbed)


def die_once_in_step_13(run: raytrain.Run, batch: raytrain.Batch, marker: Path) -> None:
    if run.rank == 1 and batch.step == 12 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_does_not_change_the_weights(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    events: list[str] = []
    loop = partial(loop_with, before_step=partial(die_once_in_step_13, marker=tmp_path / "died"))
    result = raytrain.train(
        config(images, tmp_path, trace=True),
        loop=loop,
        view=lambda snapshot: events.extend(str(event) for _, _, event in snapshot.events),
    )
    assert (result.status, result.samples_seen) == ("finished", 324)
    assert_same_weights(result, undisturbed)
    assert any("worker_failed" in event for event in events), events
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    steps = [row.step for row in read_run(str(tmp_path), "run").metrics if row.kind == "step"]
    assert steps == list(range(1, 21))


def broken(run: raytrain.Run, batch: raytrain.Batch, step: int) -> None:
    print("what the loop prints")
    if batch.step == step:
        raise RuntimeError("the loop is broken")


@pytest.mark.slow  # test_local_backend has the same without Ray
@pytest.mark.parametrize(("step", "sentence", "num_starts"), [(0, "in its first step", 1), (3, "after step 3", 2)])
def test_an_error_in_the_loop_is_reported_in_one_sentence(
    step: int, sentence: str, num_starts: int, images: Path, tmp_path: Path
) -> None:
    expected = rf"its loop failed {sentence}: RuntimeError: the loop is broken \(test_training.py, line \d+: `raise"
    with pytest.raises(raytrain.TrainingFailed, match=expected) as raised:
        raytrain.train(config(images, tmp_path), loop=partial(loop_with, before_step=partial(broken, step=step)))
    assert raised.value.summary["status"] == "failed"
    assert read_run(str(tmp_path), "run").status.status == "failed"
    logs = list(LogReader(run_store(str(tmp_path), "run"), worker_log(0)).read())
    out, err = ("".join(log.text for log in logs if log.stream == stream) for stream in ("out", "err"))
    assert out.count("what the loop prints") == num_starts * (step + 1)
    assert "RuntimeError: the loop is broken" in err
    assert "what the loop prints" not in err
    [driver] = LogReader(run_store(str(tmp_path), "run"), DRIVER).read()
    assert "TrainingFailed: Run 'run' failed" in driver.text


@pytest.mark.slow
def test_images_that_cannot_be_read_are_skipped_and_listed(
    s3: S3Server, s3_url: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_url)
    for path in images.rglob("*.png"):
        store.put(f"{path.parent.name}/{path.name}", path.read_bytes())
    whole = (images / "red" / "000.png").read_bytes()
    store.put("red/truncated.png", whole[:60])
    store.put("red/words.jpg", b"this is no image")
    result = raytrain.train(
        config(s3_url, tmp_path, validation_fraction=0.01, epochs=2, max_steps=10, max_bad_fraction=0.05)
    )
    assert result.num_skipped == 2
    skipped = {row.key: row.reason for row in read_run(str(tmp_path), "run").skipped}
    assert set(skipped) == {"red/truncated.png", "red/words.jpg"}
    assert result.samples_seen == 2 * (NUM_IMAGES - 3)
    answers = raytrain.predict("run", s3_url, str(tmp_path / "answers.csv"), storage=str(tmp_path), top_k=2, trust=True)
    assert (answers.images, answers.errors) == (92, 2)
    lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert lines[0] == '"key","label","score","label_2","score_2","error"' and len(lines) == 93
    assert [line for line in lines if "words.jpg" in line] == [
        '"red/words.jpg",,,,,"the file is text, such as an error of a server or a path"'
    ]
    measured = raytrain.evaluate("run", s3_url, storage=str(tmp_path), trust=True)
    assert (measured.images, measured.skipped) == (90, 2)
    # The same without the cluster, which this process cannot leave.
    monkeypatch.setattr(trained_run, "uses_cluster", lambda address: False)
    here = raytrain.evaluate("run", s3_url, storage=str(tmp_path), trust=True)
    assert {**here.summary(), "loss": 0} == {**measured.summary(), "loss": 0}
    assert here.loss == pytest.approx(measured.loss, abs=1e-9)
    classifier = raytrain.load("run", storage=str(tmp_path), trust=True)
    files = sorted(images.rglob("*.png"))
    right = sum(label == file.parent.name for file, (label, _) in zip(files, classifier.classify(files), strict=True))
    assert right / len(files) == pytest.approx(measured.accuracy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, r"1 of 61 images \(1.64 %\) cannot be used, such as red/words.png"),
        (
            {"max_bad_fraction": 0.0},
            r"1 of 61 images \(1.64 %\) cannot be used, such as red/words.png \(the file is text",
        ),
    ],
)
def test_too_many_bad_images_end_the_run_with_a_checkpoint(
    images: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    data = tmp_path / "data"
    for name in ("green", "red"):
        shutil.copytree(images / name, data / name)
    (data / "red" / "words.png").write_bytes(b"this is no image")
    wanted = config(data, tmp_path, **options)
    with pytest.raises(
        raytrain.TrainingFailed, match=rf"Run 'run' failed: {reason}.*--name run --storage .* --resume"
    ) as raised:
        raytrain.train(wanted)
    assert raised.value.summary["status"] == "failed" and raised.value.summary["checkpoint"]
    resumed = raytrain.train(dataclasses.replace(wanted, resume=True, max_bad_fraction=0.02))
    assert (resumed.status, resumed.num_skipped) == ("finished", 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 9}, "--workers is 9, and the cluster has 2 CPUs"),
        ({"device": "cuda"}, "there is no GPU"),
        ({"worker_load": (1.0, 1.0, 1.0)}, "3 numbers for 2 workers"),
        ({"data": ""}, "--data is missing"),
        ({"model": "resnet1"}, "--model resnet1"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    images: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        raytrain.train(config(**{"images": images, "storage": tmp_path, **options}))
    assert not (tmp_path / "run").exists()


def test_the_name_of_an_existing_run_is_refused(undisturbed: raytrain.TrainResult, images: Path) -> None:
    with pytest.raises(UsageError, match="already; resume it with --resume"):
        raytrain.train(config(images, Path(undisturbed.run_dir).parent))


@pytest.mark.slow
def test_a_resume_with_another_batch_size_is_refused(images: Path, tmp_path: Path) -> None:
    options = config(images, tmp_path, epochs=1)
    raytrain.train(options)
    with pytest.raises(UsageError, match="was made with batch size 20, and this run has 10"):
        raytrain.train(dataclasses.replace(options, resume=True, batch_size=10, epochs=2))
