"""``--metrics``: the same numbers on any number of workers, in the history, the best checkpoint and `evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raytrain
from raytrain.cli.main import main
from raytrain.inference.classification_metrics import EvaluationResult
from raytrain.runs.documents import run_store
from raytrain.runs.metrics_history import read_metrics
from raytrain.training.loop import train
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Case, Recorder, config, images, make_run

NAMES = ("top2", "auroc", "average_precision", "calibration_error", "MulticlassCohenKappa", "MulticlassRecall a")
WRITTEN = (*NAMES[:4], "torchmetrics:MulticlassCohenKappa", "torchmetrics:MulticlassRecall(average=None)")
CASE = Case(config(batch_size=12, metrics=WRITTEN, best="auroc"), 37, bad=(4,))  # a worker has no image of the last six


def evaluations(folder: str) -> list[dict[str, float | None]]:
    recorder = Recorder()
    run = make_run(CASE.options, images(CASE.num_samples, CASE.bad), folder, recorder)
    with run.steps.optimizers.followed():
        train(run)
        run.finish()
    return [dict(row.metrics) for row in recorder.rows if row.kind == "evaluation"]


def test_several_workers_measure_what_one_does(tmp_path: Path) -> None:
    (alone,) = run_in_processes(1, evaluations, str(tmp_path / "1"))
    assert len(alone) == 2 and {*NAMES} <= alone[0].keys() and alone[0] != alone[1]
    first, *_ = run_in_processes(3, evaluations, str(tmp_path / "3"))
    for ours, theirs in zip(first, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_metric_that_is_not_for_the_classes_is_refused_before_a_run_is_written(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sentence in (
        ("top3", "top3 is measured of 3 classes, of which each is always among the 3 likeliest"),
        ("torchmetrics:BinaryAUROC", "--metrics torchmetrics:BinaryAUROC is for two classes, and there are 3"),
    ):
        options = ["--data", str(images), "--storage", str(tmp_path), "--backend", "local", "--metrics", name]
        assert main(["train", "digits", "--channels", "3", *options]) == 2
        assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_command_has_them_in_its_history_and_evaluate_measures_them_again(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--epochs",
        "3",
        "--backend",
        "local",
        "--workers",
        "2",
        "--batch-size",
        "20",
        "--image-size",
        "12",
        "12",
    ]
    metrics = ["--metrics", "top2", "torchmetrics:MulticlassCohenKappa", "--best", "calibration_error"]
    common = ["--data", str(images), "--validation-fraction", "0.3", "--storage", str(tmp_path), "--name", "first"]
    assert main(["train", "digits", "--channels", "3", *common, *options, *metrics, "--json"]) == 0
    json.loads(capsys.readouterr().out.splitlines()[-1])

    rows = [row for row in read_metrics(run_store(str(tmp_path), "first")) if row.kind == "evaluation"]
    best = min(rows, key=lambda row: row.metrics["calibration_error"] or 0)
    result = raytrain.evaluate("first", storage=tmp_path)
    assert isinstance(result, EvaluationResult)
    names = ("top2", "MulticlassCohenKappa", "calibration_error")
    assert result.metrics == pytest.approx({name: best.metrics[name] for name in names}, abs=1e-4)
