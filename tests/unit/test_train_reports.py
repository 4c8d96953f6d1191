"""What Ray Train and Ray Tune get of a run: which evaluations, with which metrics, and when."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.train import collective
from ray.train.collective import barrier

from raytrain.launch.ray.train_reports import RayReports, meets_in_ray, report_to_ray
from raytrain.runs.metric_row import Kind, MetricRow
from raytrain.training.protocols import Worker

ALONE = Worker(0, 1, torch.device("cpu"))


def row(kind: Kind, step: int, **metrics: float) -> MetricRow:
    return MetricRow(kind=kind, step=step, epoch=1, metrics=metrics)


class Ray:
    """Takes reports one after the other, as soon as it is told to."""

    def __init__(self, *, takes: bool = True) -> None:
        self.reported: list[tuple[dict[str, Any], list[bytes]]] = []
        self.is_asked, self.takes = threading.Event(), threading.Event()
        if takes:
            self.takes.set()

    def report(self, metrics: dict[str, Any], folder: Path | None) -> None:
        self.is_asked.set()
        self.takes.wait(10)
        files = [] if folder is None else [path.read_bytes() for path in folder.iterdir()]
        self.reported.append((metrics, files))


def test_each_evaluation_is_reported_with_what_was_logged_and_the_last_one_with_the_checkpoint() -> None:
    ray = Ray()
    reports = RayReports(ray.report, ALONE, None, num_steps=20)
    reports.add(row("step", 9, loss=2.5))
    reports.add(row("evaluation", 10, accuracy=0.5))
    assert ray.is_asked.wait(10)
    reports.add(row("step", 20, loss=1.5))
    reports.add(row("evaluation", 20, accuracy=0.75))
    reports.finish({"status": "finished"}, b"weights")
    first, last = ray.reported
    assert first == ({"step": 10, "epoch": 1, "elapsed_s": 0.0, "train/loss": 2.5, "validation/accuracy": 0.5}, [])
    expected = {"step": 20, "epoch": 1, "elapsed_s": 0.0, "train/loss": 1.5, "validation/accuracy": 0.75}
    assert last == (expected | {"status": "finished"}, [b"weights"])


def test_a_ray_that_takes_reports_late_gets_the_newest_and_nobody_waits_for_it() -> None:
    ray = Ray(takes=False)
    reports = RayReports(ray.report, ALONE, None)
    reports.add(row("evaluation", 1))
    assert ray.is_asked.wait(10)
    for step in (2, 3, 4):
        reports.add(row("evaluation", step))
    ray.takes.set()
    reports.finish({}, None)
    assert [metrics["step"] for metrics, _ in ray.reported] == [1, 4, 4]


def test_a_run_goes_on_if_ray_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def report(metrics: dict[str, Any], folder: Path | None) -> None:
        raise RuntimeError("the controller is gone")

    reports = RayReports(report, ALONE, None)
    reports.add(row("evaluation", 1))
    reports.finish({}, None)
    assert "Ray does not take the metrics of the run, which goes on without: the controller is gone" in caplog.text


def test_a_trial_that_tune_ends_asks_its_run_to_stop() -> None:
    stopped = threading.Event()

    def report(metrics: dict[str, Any], folder: Path | None) -> None:
        raise SystemExit

    reports = RayReports(report, ALONE, None, on_stop=stopped.set)
    reports.add(row("evaluation", 1))
    assert stopped.wait(10)
    reports.finish({}, None)


def reports_itself(run: Any) -> None:
    run.train.report({"loss": 1.0})


def meets_itself(run: Any) -> None:
    barrier()


def meets_by_its_module(run: Any) -> None:
    collective.barrier()


def uses_torch(run: Any) -> None:
    dist.barrier()
    run.log(loss=1.0)


@pytest.mark.parametrize(
    ("loop", "meets"), [(reports_itself, True), (meets_itself, True), (meets_by_its_module, True), (uses_torch, False)]
)
def test_a_loop_that_reports_to_ray_itself_is_left_alone(loop: Any, meets: bool) -> None:
    assert meets_in_ray(loop) is meets


def test_outside_of_ray_nothing_is_reported() -> None:
    assert report_to_ray() is None
