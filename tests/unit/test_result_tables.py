"""The tables that commands print: results of training, runs, evaluations and audits."""

from __future__ import annotations

import dataclasses
import io
import shlex
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from raytrain.cli.commands import COMMANDS
from raytrain.cli.main import main
from raytrain.cli.parser import parse
from raytrain.config import TrainConfig
from raytrain.diagnostics.audit import AuditResult, EpochAudit
from raytrain.display.diagnostics_tables import audit_page
from raytrain.display.evaluation import evaluation_page
from raytrain.display.result_page import result_page
from raytrain.display.run_tables import run_page, run_record_json, runs_table
from raytrain.errors import shell_command
from raytrain.experiments.search_space import Point
from raytrain.experiments.sweep_plan import Sweep, sweep_command
from raytrain.inference.classification_metrics import EvaluationResult, score
from raytrain.recipes import cifar10
from raytrain.runs.metric_row import MetricRow, SkippedImage
from raytrain.runs.outcome import StopReason, train_command
from raytrain.runs.records import RunRecord
from raytrain.runs.status import RunStatus
from raytrain.storage.store import StoredObject
from tests.helpers.snapshots import train_result


def text(renderable: RenderableType, width: int = 110) -> str:
    """Return the printed text, with single blanks between the words."""
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable, highlight=False)
    return "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())


def test_an_unfinished_run_prints_the_command_that_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV", raising=False)
    config = cifar10(data="my images", workers=2, flip="none", image_size=(8, 9))
    seen = text(result_page(config, train_result(status="stopped"))).replace("\n", " ")
    assert "status stopped after 12 steps, 3 epochs, 96 images on 2 workers" in seen
    assert (
        "last checkpoints/step-000000012.pt; measured last: validation accuracy 0.9700" in seen
        and "time 00:01:01" in seen
    )
    assert seen.endswith("Resume with raytrain train --name first --workers 2 --resume"), "the run knows all else"
    own = dataclasses.replace(config, loop="my.py:train", storage="s3://b/runs", model="resnet18")
    code = text(result_page(own, train_result(status="stopped"))).replace("\n", " ")
    assert code.endswith("--name first --storage s3://b/runs --workers 2 --loop my.py:train --resume"), (
        "code is typed again"
    )
    monkeypatch.setenv("UV", "/usr/bin/uv")
    stopped = text(result_page(config, train_result(status="stopped")))
    assert "Resume with uv run raytrain train " in " ".join(stopped.split())
    assert "Resume" not in text(result_page(config, train_result()))
    spent = train_result(status="stopped", stop_reason=StopReason("cost", "20", value=20.1))
    assert "Resume with a higher --max-cost added to" in text(result_page(config, spent))


def test_a_result_names_the_best_checkpoint_and_what_to_do_with_it() -> None:
    config = cifar10(data="images", storage="my runs", best="loss")
    seen = text(result_page(config, train_result(), (-0.25, "checkpoints/step-000000008.pt")))
    assert "best checkpoints/step-000000008.pt, which the commands below use; loss 0.2500" in seen
    commands = [line.partition("raytrain ")[2] for line in seen.partition("Try next")[2].splitlines() if line]
    assert [parse(shlex.split(command), COMMANDS).func.__name__ for command in commands] == [
        *("show", "evaluate", "predict", "export", "serve")
    ]
    assert "Try next" not in text(result_page(config, train_result(status="failed", error="no"), (1.0, "a.pt")))


def test_the_time_of_a_resumed_run_is_that_of_the_attempt_and_of_all() -> None:
    seen = text(result_page(cifar10(data="images"), train_result(total_seconds=161.5)))
    assert "time 00:01:01; with earlier attempts 00:02:41" in seen
    assert "earlier" not in text(result_page(cifar10(data="images"), train_result(total_seconds=61.5)))


def test_the_page_of_a_run_has_the_time_of_all_attempts_and_no_count_that_is_wrong_without_a_gpu() -> None:
    summary = {"status": "stopped", "seconds": 61.5, "total_seconds": 161.5, "num_decoded_on_cpu": 0}
    seen = text(run_page(dataclasses.replace(record(), summary=summary, seconds=161.5)))
    assert "Elapsed: 00:02:41" in seen and "total seconds 161.5" in seen and "decoded on cpu" not in seen
    once = {**summary, "total_seconds": 61.5, "num_decoded_on_cpu": 3}
    seen = text(run_page(dataclasses.replace(record(), summary=once)))
    assert "total seconds" not in seen and "decoded on cpu 3" in seen


def record() -> RunRecord:
    return RunRecord(
        name="first",
        config=TrainConfig(name="first", batch_size=8, learning_rate=0.1),
        status=RunStatus(status="stopped", step=20, num_steps=90, epoch=2, num_epochs=9),
        images={
            "training": 5_000,
            "validation": 100,
            "test": 50,
            "left_out": {".tif files": 3, "tables and descriptions": 2},
        },
        summary={"status": "stopped", "stop_reason": {"kind": "signal", "detail": "SIGINT"}},
        metrics=[MetricRow(kind="step", step=20, epoch=2, elapsed_s=60.0, metrics={"loss": 0.1, "generator": 2.0})],
        checkpoints=[],
        skipped=[SkippedImage(f"cat/{number}.jpg", "truncated") for number in range(7)],
    )


def test_the_page_of_a_run_has_its_status_curves_and_skipped_images() -> None:
    seen = text(run_page(record()))
    expected = ("first stopped at step 20/90, epoch 2/9", "Epoch: 2, Elapsed: 00:01:00", "train 0.100", "Ctrl-C")
    for part in (*expected, "generator 2"):
        assert part in seen
    assert "5,000 for training, 100 for validation, 50 for test" in seen and "left out 3 .tif files" in " ".join(
        seen.split()
    )
    assert "7 images skipped\ncat/0.jpg: truncated" in seen and "and 2 more in skipped.jsonl" in seen


def test_the_command_of_a_run_is_not_cut_where_lines_are_not_wrapped() -> None:
    record_here = record()
    assert record_here.config is not None
    printed = io.StringIO()
    Console(file=printed, width=40).print(run_page(record_here), soft_wrap=True)
    assert train_command(record_here.config) in printed.getvalue()


def test_the_page_of_a_run_has_its_checkpoints_and_the_newest_files_of_its_loop() -> None:
    def stored(path: str, hour: int) -> StoredObject:
        return StoredObject(path, 1_500, "", datetime(2026, 1, 2, hour, tzinfo=timezone.utc))

    files = [stored(f"files/of-{hour:02}.png", hour) for hour in range(22)]
    seen = text(run_page(dataclasses.replace(record(), checkpoints=[stored("checkpoints/a.pt", 1)], files=files)))
    assert "checkpoints/a.pt 1.5 kB" in seen
    assert "file of the loop (the newest 20 of 22)" in seen
    assert "of-21.png" in seen and "of-02.png" in seen and "of-01.png" not in seen


def test_the_page_of_a_resumed_run_does_not_show_how_the_attempt_before_it_ended() -> None:
    resumed = dataclasses.replace(record(), status=dataclasses.replace(record().status, status="running"))
    assert "Ctrl-C" not in text(run_page(resumed))


def test_the_page_of_a_sweep_has_the_command_that_started_it_and_no_epochs() -> None:
    document = {"vary": ["learning-rate=log:0.01..1"], "points": [{"learning_rate": 0.1}], "trials": 3}
    document |= {"sampler": "tpe", "pruner": "median"}
    status = RunStatus(status="interrupted", step=20, num_steps=90)
    config = cifar10(name="rates", data="images", batch_size=8)
    sweep = dataclasses.replace(record(), name="rates", config=config, status=status, sweep=document)
    seen = " ".join(text(run_page(sweep)).split())
    assert "rates interrupted at step 20/90 raytrain sweep cifar10 --data images --name rates --batch-size 8" in seen
    assert "--vary learning-rate=log:0.01..1 --trials 3 --sampler tpe --pruner median" in seen
    assert f"A sweep of 3 trials. Those that have begun are shown by {shell_command('compare', 'rates')}" in seen
    listed = text(runs_table([sweep], "./runs"))
    assert "rates cifar10 interrupted – 20/90" in listed and "0/0" not in listed
    # A document that is damaged says nothing of the sweep, and the page has all else.
    damaged = dataclasses.replace(sweep, sweep={**document, "vary": ["learning-rate=fast"]})
    assert "rates interrupted at step 20/90" in text(run_page(damaged))


def test_all_points_of_a_sweep_need_no_number_and_some_do() -> None:
    def command(*points: Point, vary: str) -> str:
        sweep = Sweep(vary=tuple(vary.split()), points=points)
        return sweep_command(sweep, cifar10(data="images"))

    rates: list[Point] = [{"learning_rate": rate} for rate in (0.1, 0.2)]
    assert command(*rates, vary="learning-rate=0.1,0.2").endswith(" --vary learning-rate=0.1,0.2")
    assert command(*rates[:1], vary="learning-rate=0.1,0.2").endswith(" --trials 1")
    folds: list[Point] = [{"learning_rate": 0.1, "validation_fold": fold} for fold in (0, 1)]
    assert command(*folds, vary="learning-rate=0.1,0.2 validation-fold=0,1").endswith(" --trials 1")

    # A sampler needs the number, also if it has chosen all points.
    chosen = Sweep(vary=("optimizer=sgd,lion",), points=(), trials=2, sampler="tpe")
    assert sweep_command(chosen, cifar10(data="images")).endswith(" --trials 2 --sampler tpe")


def test_the_json_of_a_run_has_flat_metric_rows() -> None:
    document = run_record_json(record())
    assert document["metrics"] == [
        {"kind": "step", "step": 20, "epoch": 2, "elapsed_s": 60.0, "loss": 0.1, "generator": 2.0}
    ]
    assert document["skipped"][0] == {"key": "cat/0.jpg", "reason": "truncated"}


def evaluation(truth: list[int], answers: list[int], classes: list[str]) -> EvaluationResult:
    about = {"run": "first", "data": "d", "checkpoint": "c.pt", "skipped": 1}
    return score(np.array(truth), np.array(answers), np.ones(len(truth)), classes, **about)


def test_an_evaluation_shows_classes_and_confusions() -> None:
    seen = text(evaluation_page(evaluation([0, 0, 0, 0, 1], [0, 0, 0, 1, 1], ["cat", "dog"]), "first-confusion.png"))
    for part in ("accuracy 0.8000", "images 5", "skipped 1", "picture first-confusion.png", "cat 4 3 0.7500"):
        assert part in seen
    assert "cat dog 1 25.0%" in seen


def test_only_the_worst_of_many_classes_are_shown() -> None:
    right = [label for label in range(30) for _ in range(label + 1)]
    wrong = [label for label in range(30) if label != 7]
    classes = [f"class-{label}" for label in range(30)]
    seen = text(evaluation_page(evaluation(right + wrong, right + [7] * len(wrong), classes)), 150)
    assert "class-0 2 1 0.5000" in seen
    assert "class-29 " not in seen
    assert "and 10 better classes" in seen
    assert "No image was misclassified." in text(evaluation_page(evaluation([0], [0], ["cat"])))


def test_an_evaluation_says_which_of_the_images_of_the_run_it_has_measured() -> None:
    given = evaluation([0], [0], ["cat"])
    assert "data d\n" in text(evaluation_page(given))
    assert "data validation images of the run, in d\n" in text(
        evaluation_page(dataclasses.replace(given, part="validation"))
    )


@pytest.mark.parametrize(
    ("trained_on", "all_compared", "warning"),
    [
        (None, None, None),
        (0, True, None),
        (0, False, "Some of these images may be training images of the run"),
        (1, True, "\n1 of these"),
        (1, False, "\nAt least 1 of these"),
    ],
)
def test_an_evaluation_warns_of_training_images(
    trained_on: int | None, all_compared: bool | None, warning: str | None
) -> None:
    several = {"trained_on": trained_on, "all_compared": all_compared}
    seen = text(evaluation_page(dataclasses.replace(evaluation([0, 0], [0, 0], ["cat"]), **several)))
    assert warning in seen if warning else "training images" not in seen
    assert "compared  " not in seen  # a value that says nothing without the sentence


def audited(**faults: tuple[str, ...]) -> AuditResult:
    fields = {"missing": (), "doubled": (), "misplaced": (), **faults}
    return AuditResult("first", 1, 20, (EpochAudit(epoch=1, planned=1000, used_once=990, unreadable=2, **fields),))


def test_an_audit_ends_with_its_verdict() -> None:
    clean = text(audit_page(audited()))
    assert "1 1,000 990 2 0 0 0" in clean
    assert "Every readable sample was used exactly once per epoch, in its step (steps 1 to 20)." in clean
    seen = text(audit_page(audited(missing=tuple(f"cat/{number}.jpg" for number in range(12)), doubled=("a.jpg",))))
    assert "Some samples were not used exactly once per epoch, in their step (steps 1 to 20):" in seen
    assert "missing in epoch 1: cat/9.jpg" in seen and "cat/10.jpg" not in seen
    assert "and 3 more; --json lists them all" in seen


def test_a_new_project_says_how_it_is_started_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UV", "/usr/bin/uv")
    assert main(["new", str(tmp_path / "project")]) == 0
    assert capsys.readouterr().out.rstrip().endswith("project && uv run python train.py")
