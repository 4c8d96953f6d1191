"""What TensorBoard, MLflow, W&B and Prometheus have of a run, read with their own tools."""

from __future__ import annotations

import math
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import wandb
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raytrain.errors import UsageError
from raytrain.runs.documents import EVALUATION, is_run_file, run_store, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.trackers.prometheus import PrometheusTracker
from raytrain.trackers.tracker import TrackedRun, TrackedSweep
from raytrain.trackers.wandb import WandbTracker
from tests.helpers.stored_evaluation import evaluation
from tests.helpers.tracked_runs import evaluation_row, read_wandb_file, step_rows, tracked
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.not_quick

HOSTILE = "<b>[red]\x1b[2J\x9b31m"
CHECKPOINT = "checkpoints/step-000000006.pt"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = run_store(str(tmp_path / "runs"), "first")
    store.put(CHECKPOINT, b"weights")
    return store


def odd_row(step: int) -> MetricRow:
    metrics = {"loss": math.nan, "huge": 1e300, "endless": -math.inf, HOSTILE: 1.0, "x" * 300: 2.0}
    return MetricRow(kind="step", step=step, epoch=1, metrics=metrics)


# TensorBoard


def scalars(folder: str | Path, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_tensorboard_reads_a_run_and_its_resume(store: Store) -> None:
    [place] = tracked(store, ["tensorboard"], [*step_rows(1, 4), evaluation_row(4)])
    assert place == f"tensorboard --logdir {store.url}/tensorboard"
    tracked(store, ["tensorboard"], step_rows(1, 6), epochs=30)
    folder = f"{store.url}/tensorboard"
    assert scalars(folder, "train/loss") == [(step, pytest.approx(1 / step)) for step in range(1, 7)]
    assert scalars(folder, "validation/accuracy") == [(4, 0.5)]
    tags = EventAccumulator(folder).Reload().SummaryMetadata("_hparams_/session_start_info")
    assert tags.plugin_data.plugin_name == "hparams"


def test_the_command_that_shows_a_run_in_a_folder_with_spaces_can_be_copied(tmp_path: Path) -> None:
    store = run_store(f"{tmp_path}/my runs", "first")
    [place] = tracked(store, ["tensorboard"], step_rows(1, 2))
    assert shlex.split(place) == ["tensorboard", "--logdir", f"{tmp_path}/my runs/first/tensorboard"]


def test_tensorboard_reads_odd_values_and_names(store: Store) -> None:
    tracked(store, ["tensorboard"], [odd_row(1), *step_rows(2, 3)])
    reader = EventAccumulator(f"{store.url}/tensorboard").Reload()
    assert math.isnan(reader.Scalars("train/loss")[0].value)
    assert all(name.isprintable() and "<" not in name for name in reader.Tags()["scalars"])


def test_tensorboard_shows_the_images_of_the_last_evaluation(store: Store) -> None:
    write_json(store, EVALUATION, evaluation(step=4))
    tracked(store, ["tensorboard"], [*step_rows(1, 4), evaluation_row(4)])
    reader = EventAccumulator(f"{store.url}/tensorboard").Reload()
    pictures = ["train/last_batch", "validation/confusion_matrix", "validation/most_wrong"]
    assert sorted(reader.Tags()["images"]) == pictures
    [shown] = reader.Images("validation/most_wrong")
    assert (shown.step, shown.width) == (4, 328)


def test_tensorboard_shows_the_trials_of_a_sweep_together(store: Store) -> None:
    storage = str(Path(store.url).parent)
    [place] = tracked(store, ["tensorboard"], step_rows(1, 3), sweep="rates", storage=storage)
    assert place == f"tensorboard --logdir {storage}/rates/tensorboard"
    assert [step for step, _ in scalars(f"{storage}/rates/tensorboard/first", "train/loss")] == [1, 2, 3]
    assert not list(store.list("tensorboard"))


@pytest.mark.parametrize("sweep", [None, "rates"])
def test_tensorboards_files_are_the_runs_own_so_that_its_name_is_free_again(store: Store, sweep: str | None) -> None:
    storage = str(Path(store.url).parent)
    tracked(store, ["tensorboard"], step_rows(1, 3), sweep=sweep, storage=storage)
    paths = [found.path for found in run_store(storage, sweep or "first").list("tensorboard")]
    assert paths and all(map(is_run_file, paths)), paths


def test_tensorboards_files_of_a_run_in_s3_are_beside_it(s3: Any, tmp_path: Path) -> None:
    store = open_store("s3://tests/tensorboard/first")
    tracked(store, ["tensorboard"], step_rows(1, 3))
    for found in store.list("tensorboard"):
        (tmp_path / found.path.rpartition("/")[2]).write_bytes(store.get(found.path))
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == [1, 2, 3]


# MLflow


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an MLflow server."""
    command = [sys.executable, "-m", "tests.helpers.mlflow_server", str(tmp_path_factory.mktemp("mlflow"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


@pytest.fixture
def mlflow(mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the server that the environment names."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "seen by raytrain")
    from mlflow.tracking import MlflowClient

    return MlflowClient()


def run_id(place: str) -> str:
    assert place.startswith("http://127.0.0.1"), place
    return place.rpartition("/")[2]


def test_mlflow_has_a_run_and_its_resume(store: Store, mlflow: Any) -> None:
    [place] = tracked(store, ["mlflow"], [*step_rows(1, 4), evaluation_row(4)], checkpoint=CHECKPOINT)
    first = mlflow.get_run(run_id(place))
    assert (first.info.status, first.info.run_name) == ("FINISHED", "first")
    assert mlflow.get_experiment(first.info.experiment_id).name == "seen by raytrain"
    assert first.data.params["learning_rate"] == "0.01"
    assert [file.path for file in mlflow.list_artifacts(run_id(place), "checkpoints")] == [CHECKPOINT]
    assert tracked(store, ["mlflow"], step_rows(1, 6), epochs=30, status="failed") == [place]
    history = mlflow.get_metric_history(run_id(place), "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4, 5, 6]
    assert mlflow.get_metric_history(run_id(place), "validation/accuracy")[0].value == 0.5
    resumed = mlflow.get_run(run_id(place))
    assert (resumed.info.status, resumed.data.params["epochs"], resumed.data.tags["epochs"]) == ("FAILED", "20", "30")


def test_mlflow_takes_odd_values_long_names_and_many_rows(store: Store, mlflow: Any) -> None:
    rows = [odd_row(1), *step_rows(2, 1500)]
    [place] = tracked(store, ["mlflow"], rows, freeze=tuple(f"layer{number}" for number in range(1000)))
    assert len(mlflow.get_run(run_id(place)).data.params["freeze"]) == 500
    values = [metric.value for metric in mlflow.get_metric_history(run_id(place), "train/loss")]
    assert math.isnan(values[0])
    assert len(values) == 1500


def test_trials_that_make_the_experiment_at_the_same_time_share_it(
    store: Store, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytrain.trackers.mlflow import MLflowTracker  # deferred: each process of the tests collects this module

    [place] = tracked(store, ["mlflow"], step_rows(1, 2))
    find, answers = type(mlflow).get_experiment_by_name, [None]
    monkeypatch.setattr(  # as if it were made right after the question
        type(mlflow), "get_experiment_by_name", lambda self, name: answers.pop() if answers else find(self, name)
    )
    other = MLflowTracker(TrackedRun("other", store))
    experiments = {mlflow.get_run(id).info.experiment_id for id in (run_id(place), other.run_id)}
    assert len(experiments) == 1 and not answers


def test_mlflow_never_continues_a_run_that_is_not_this_runs(store: Store, mlflow: Any) -> None:
    theirs = mlflow.create_run("0", run_name="precious").info.run_id
    write_json(store, "trackers/mlflow.json", {"id": theirs, "step": 2})
    [place] = tracked(store, ["mlflow"], step_rows(1, 4))
    assert run_id(place) != theirs
    assert mlflow.get_run(theirs).data.metrics == {}


def test_an_mlflow_server_that_is_not_there_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hidden-word@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    [report] = tracked(store, ["mlflow"], step_rows(1, 4))
    assert report.startswith("failed (")
    assert "hidden-word" not in report


def test_mlflow_shows_the_images_of_the_last_evaluation(store: Store, mlflow: Any) -> None:
    write_json(store, EVALUATION, evaluation(step=4))
    [place] = tracked(store, ["mlflow"], [*step_rows(1, 4), evaluation_row(4)])
    files = [file.path for file in mlflow.list_artifacts(run_id(place), "images")]
    pictures = [re.findall(r"[a-z]+_[a-z]+|step.\d+", file) for file in files if file.endswith(".png")]
    names = "confusion_matrix", "last_batch", "most_wrong"
    assert sorted((name, step[-1]) for name, step in pictures) == [(name, "4") for name in names]


def test_mlflow_groups_the_trials_of_a_sweep_by_a_tag(store: Store, mlflow: Any) -> None:
    [of_sweep] = tracked(store, ["mlflow"], step_rows(1, 2), sweep="rates", storage=str(Path(store.url).parent))
    assert mlflow.get_run(run_id(of_sweep)).data.tags["raytrain.sweep"] == "rates"
    store.delete("trackers/mlflow.json")
    [alone] = tracked(store, ["mlflow"], step_rows(1, 2))
    assert "raytrain.sweep" not in mlflow.get_run(run_id(alone)).data.tags


def test_a_tag_of_mlflow_stops_a_run_and_not_its_resume(store: Store, mlflow: Any) -> None:
    from raytrain.trackers.mlflow import MLflowTracker  # deferred: each process of the tests collects this module

    tracker = MLflowTracker(TrackedRun("first", store))
    assert not tracker.stop_requested()
    mlflow.set_tag(tracker.run_id, "raytrain.stop", "True")
    assert tracker.stop_requested()
    resumed = MLflowTracker(TrackedRun("first", store, tracker.run_id))
    assert resumed.run_id == tracker.run_id and not resumed.stop_requested()


# W&B


def test_the_stop_button_of_wandb_stops_the_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    given: list[Any] = []
    settings = wandb.Settings
    monkeypatch.setattr(wandb, "Settings", lambda **values: given.append(values) or settings(**values))
    monkeypatch.setattr(wandb.Settings, "model_fields", settings.model_fields, raising=False)
    tracker = WandbTracker(TrackedRun("first", store))
    assert not tracker.stop_requested()
    given[0]["stop_fn"]()  # as wandb does in a thread of its own
    assert tracker.stop_requested()
    tracker.finalize("success")
    wandb.teardown()  # it keeps the folder of the first run of a process


def test_wandb_groups_the_trials_of_a_sweep(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def refuse(**values: Any) -> Any:
        started.append(values)
        raise RuntimeError("no W&B here")

    monkeypatch.setattr(wandb, "init", refuse)
    for sweep in (TrackedSweep("rates", store), None):
        with pytest.raises(RuntimeError):
            WandbTracker(TrackedRun("rates-00", store, sweep=sweep))
    assert [values["group"] for values in started] == ["rates", None]


def test_wandb_offline_has_a_run_and_its_resume(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    [place] = tracked(store, ["wandb"], [*step_rows(1, 4), evaluation_row(4)], checkpoint=CHECKPOINT)
    assert place.startswith(f"wandb sync {tmp_path}"), place
    tracked(store, ["wandb"], [*step_rows(1, 5), odd_row(6)], epochs=30)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1
    (first, history), (second, rest) = map(read_wandb_file, files)
    assert (first["epochs"], second["epochs"]) == (20, 30)
    assert [history[step]["train/loss"] for step in (1, 2, 3, 4)] == [1.0, 0.5, pytest.approx(1 / 3), 0.25]
    assert history[4]["validation/accuracy"] == 0.5
    assert sorted(rest) == [5, 6]
    assert str(rest[6]["train/loss"]).lower() == "nan"


def test_wandb_has_each_image_of_the_last_evaluation_with_its_caption(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    write_json(store, EVALUATION, evaluation(step=4))
    [place] = tracked(store, ["wandb"], [*step_rows(1, 4), evaluation_row(4), *step_rows(5, 6)])
    [file] = Path(place.partition("wandb sync ")[2]).glob("*.wandb")  # wandb remembers the folder of an earlier test
    _, history = read_wandb_file(file)
    # W&B has them at its latest step.
    assert history[6]["validation/most_wrong.captions"] == ["cat\npredicted dog 90%"] * 2
    assert (file.parent / "files" / history[6]["validation/most_wrong.filenames"][1]).is_file()


# Prometheus


def scraped(url: str) -> dict[str, dict[str, float]]:
    """The gauges by name and by the label ``run``, as Prometheus parses them."""
    with urllib.request.urlopen(url) as page:
        families = text_string_to_metric_families(page.read().decode())
    return {one.name: {each.labels["run"]: each.value for each in one.samples} for one in families}


def test_prometheus_scrapes_the_last_row_of_each_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    first, second = (PrometheusTracker(TrackedRun(name, store)) for name in ("first", 'second"\n{}'))
    assert first.place.startswith("http://127.0.0.1:")
    first.log_metrics({"train/loss": 0.5, "learning_rate": 0.1}, 10)
    first.log_metrics({"train/loss": math.nan, "validation/accuracy": 0.75}, 20)
    second.log_metrics({"train/loss": 2.0}, 5)
    gauges = scraped(first.place)
    assert math.isnan(gauges.pop("raytrain_train_loss")["first"])
    assert gauges == {
        "raytrain_step": {"first": 20},
        "raytrain_validation_accuracy": {"first": 0.75},
        "raytrain_learning_rate": {"first": 0.1},
    }
    assert scraped(second.place)["raytrain_train_loss"] == {'second"\n{}': 2.0}
    for tracker in (first, second):
        tracker.finalize("success")
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(tracker.place)


def test_strangers_take_few_connections_of_a_run_that_prometheus_scrapes(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    tracker = PrometheusTracker(TrackedRun("first", store))
    address = ("127.0.0.1", int(tracker.place.split(":")[2].partition("/")[0]))
    with socket.create_connection(address, timeout=60) as malformed:
        malformed.sendall(b"\x1b[31mX / HTTP/1.1\r\nA\x1b[31m: b\r\n\r\n")
        assert malformed.recv(1000)
    crowd = [socket.create_connection(address, timeout=60) for _ in range(100)]
    for connection in crowd[20:]:  # the first ones are answered, if they ask
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    for connection in crowd:
        connection.close()
    wait_for(lambda: _is_scraped(tracker.place), "the strangers have left room")
    tracker.finalize("success")
    assert capfd.readouterr().err == ""


def _is_scraped(url: str) -> bool:
    with suppress(OSError):
        return scraped(url) == {}
    return False


@pytest.mark.parametrize("port", ["99999", "-1", "none"])
def test_a_port_of_prometheus_that_does_not_exist_is_said(
    store: Store, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", port)
    with pytest.raises(UsageError, match=f"OTEL_EXPORTER_PROMETHEUS_PORT is '{port}'; a port is a number from 1 to"):
        PrometheusTracker(TrackedRun("first", store))


def test_two_runs_of_a_machine_have_a_port_each(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    first = PrometheusTracker(TrackedRun("first", store))
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", first.place.split(":")[2].partition("/")[0])
    second = PrometheusTracker(TrackedRun("second", store))
    assert scraped(second.place) == scraped(first.place) == {}
    for tracker in (first, second):
        tracker.finalize("success")
