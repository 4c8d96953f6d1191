"""Runs with three parts of images: those for validation choose a checkpoint, and the test images are measured once."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

import raytrain
from raytrain.data.labels.manifest import Manifest
from raytrain.diagnostics.look import look_at
from raytrain.display.look import look_page
from raytrain.runs.documents import TEST_MANIFEST, VALIDATION_MANIFEST, run_store
from raytrain.runs.metrics_history import read_metrics
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.evaluation import evaluate
from raytrain.training.run import Run
from tests.helpers.attached_runs import attached_run
from tests.helpers.folder_runs import folder_run, train_here, train_runs
from tests.helpers.small_runs import config, make_images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training, 12 validation and 18 test images of three classes."""
    whole, parted = make_images(tmp_path_factory.mktemp("whole")), tmp_path_factory.mktemp("parted")
    for folder in sorted(whole.iterdir()):
        for number, file in enumerate(sorted(folder.iterdir())):
            part = "test" if number >= 24 else "val" if number >= 20 else "train"
            (parted / part / folder.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, parted / part / folder.name)
    return parted


def test_test_images_are_measured_once_and_the_same_on_any_number_of_workers(images: Path, tmp_path: Path) -> None:
    one = folder_run(images, tmp_path, "one")
    _, recorder = train_here(one)
    rows = [row for row in recorder.rows if row.kind == "test"]
    assert len(rows) == 1 and rows[0].step == recorder.rows[-1].step
    three = folder_run(images, tmp_path, "three", loop=writes_what_it_tested)
    train_runs(3, three)
    found = json.loads((tmp_path / "tested-0.json").read_text())
    assert found == pytest.approx({name: value for name, value in rows[0].metrics.items() if name in found})


def test_an_attached_run_measures_its_test_images_once_at_its_end(images: Path, tmp_path: Path) -> None:
    result = attached_run(images, tmp_path, epochs=2)
    rows = [row for row in read_metrics(run_store(str(tmp_path), "run")) if row.kind in ("evaluation", "test")]
    assert [row.kind for row in rows] == ["evaluation", "evaluation", "test"]
    assert rows[2].step == result.steps == 6 and rows[2].metrics["accuracy"] is not None
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] == pytest.approx(rows[2].metrics["accuracy"])


def test_a_look_has_all_three_parts(images: Path, tmp_path: Path) -> None:
    copied = next((images / "train" / "red").iterdir())
    whole = shutil.copytree(images, tmp_path / "images")
    shutil.copy(copied, whole / "test" / "red" / "copy.png")
    result = look_at(config(whole, tmp_path))
    assert (result.training_images, result.validation_images, result.test_images) == (60, 12, 19)
    counts = {each.name: (each.training, each.validation, each.test) for each in result.classes}
    assert counts == {"blue": (20, 4, 6), "green": (20, 4, 6), "red": (20, 4, 7)}
    assert result.sample.images == result.duplicates.compared == 91
    ((key, of_training),) = [(each.key, each.training_key) for each in result.duplicates.held_out]
    assert key.endswith("red/copy.png") and of_training.endswith(f"red/{copied.name}")
    console = Console(width=120, file=io.StringIO())
    console.print(look_page(result))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert re.search(r"test images +19", text) and re.search(r"red +20 +4 +7", text)


def learn(run: Run, model: torch.nn.Module, measure: Callable[[], dict[str, float]]) -> None:
    """Train ``model`` to the end of the run, which ``measure`` evaluates."""
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs(evaluate=measure):
        for batch in epoch:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()


def writes_what_it_tested(run: Run) -> None:
    """Train as the built-in loop does, and write down what each evaluation of test images gave."""
    model = run.prepare(run.build_model())

    def measure() -> dict[str, float]:
        numbers = evaluate(run, model)
        Path(run.config.storage, f"tested-{run.rank}.json").write_text(json.dumps(numbers))
        return numbers

    learn(run, model, measure)


def gets_worse(run: Run) -> None:
    """Measure a lower accuracy after each epoch, so that the first checkpoint is the best one."""
    model = run.prepare(run.build_model())
    scores = iter((0.9, 0.5, 0.1))

    def measure() -> dict[str, float]:
        batches = list(run.evaluation_batches())
        samples = [int(sample) for batch in batches for sample in batch.samples]
        folders = {Path(key).parts[0] for batch in batches for key in run.keys(batch)}
        total = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
        counts = {"images": run.total([len(samples)])[0], "of test": float(folders == {"test"})}
        return {"accuracy": next(scores, 0.0), "weights": total, **counts}

    learn(run, model, measure)


def test_the_test_images_are_measured_with_the_best_checkpoint(images: Path, tmp_path: Path) -> None:
    run = folder_run(images, tmp_path, "worse", loop=gets_worse, epochs=3)
    _, recorder = train_here(run)
    rows = [row for row in recorder.rows if row.kind in ("evaluation", "test")]
    assert [(row.kind, row.metrics["images"]) for row in rows] == [*[("evaluation", 12)] * 3, ("test", 18)]
    assert [row.metrics["of test"] for row in rows] == [0, 0, 0, 1]
    weights = [row.metrics["weights"] for row in rows]
    assert weights[3] == weights[0] and len(set(weights)) == 3
    # Nothing is written after it: the run goes on from its last step.
    store = run_store(str(tmp_path), "worse")
    newest = read_checkpoint(store, "checkpoints/step-000000009.pt")
    assert newest.progress.step == 9 and newest.progress.test_accuracy is None


def test_a_stop_is_no_end(images: Path, tmp_path: Path) -> None:
    stopped = folder_run(images, tmp_path, "stopped", stop_after=2)
    _, recorder = train_here(stopped)
    assert not [row for row in recorder.rows if row.kind == "test"]
    _, recorder = train_here(folder_run(images, tmp_path, "stopped"))
    assert len([row for row in recorder.rows if row.kind == "test"]) == 1


def test_an_evaluation_that_reads_other_images_is_no_test(images: Path, tmp_path: Path) -> None:
    def fixed(run: Run) -> None:
        learn(run, run.prepare(run.build_model()), lambda: {"accuracy": 1.0})

    _, recorder = train_here(folder_run(images, tmp_path, "fixed", loop=fixed))
    assert not [row for row in recorder.rows if row.kind == "test"]
    assert any("test images are not measured" in str(event) for event in recorder.events)


def test_evaluate_measures_what_the_run_measured_at_its_end(images: Path, tmp_path: Path) -> None:
    config = folder_run(images, tmp_path, "whole", backend="local", workers=2, device="cpu").config
    result = raytrain.train(config)
    assert result.test_accuracy is not None and result.validation_accuracy is not None
    again = raytrain.evaluate("whole", storage=tmp_path, trust=True)
    assert (again.part, again.images, again.accuracy) == ("test", 18, result.test_accuracy)
    store = run_store(str(tmp_path), "whole")
    sizes = [len(Manifest.from_parquet(store.get(name))) for name in (VALIDATION_MANIFEST, TEST_MANIFEST)]
    assert sizes == [12, 18]
    rows = [row for row in read_metrics(store) if row.kind == "test"]
    assert [row.accuracy for row in rows] == [result.test_accuracy]
