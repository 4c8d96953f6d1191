"""N workers compute what one computes: the built-in loop in gloo processes, compared with a plain PyTorch loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytrain.data.blocks import LocalBatch
from raytrain.data.labels.part_names import Part
from raytrain.training.loop import train
from raytrain.training.run import Run
from tests.helpers.memory_runs import (
    Case,
    Recorder,
    alone,
    assert_same,
    config,
    images,
    make_run,
    measured,
    on_one_worker,
    together,
)


def test_a_run_stopped_in_any_step_and_resumed_on_more_workers_ends_with_the_same_weights(tmp_path: Path) -> None:
    options = config(batch_size=16, optimizer="adamw", learning_rate=0.01)  # 5 steps per epoch, 10 in total.
    expected = alone(Case(options))
    rows = expected[1]
    stops = (0, 2, 3, 4, 5, 9)  # at the start, within and at the end of the first epoch, and the same of the second
    halves = {f"stop {after}": Case(options, stop_after=after, folder=str(tmp_path / str(after))) for after in stops}
    first = together(halves, 2)
    rest = together({name: dataclasses.replace(case, stop_after=None) for name, case in halves.items()}, 3)
    for after, name in zip(stops, halves, strict=True):
        steps = {results[name]["outcome"].progress.step for results in first}
        assert len(steps) == 1 and steps <= {after + 1, after + 2}, f"asked after {after} steps, stopped after {steps}"
        assert first[0][name]["outcome"].status == ("stopped" if after < 9 else "finished")
        for results in rest:
            assert_same(name, {**results[name], "rows": []}, Case(options), expected, check_rows=False)
        assert rest[0][name]["outcome"].progress.samples_seen == 140
        both = first[0][name]["rows"] + rest[0][name]["rows"]
        assert [row.loss for row in both if row.kind == "step"] == pytest.approx(
            [row["loss"] for row in rows], abs=1e-9
        )
        assert [row.step for row in both if row.kind == "evaluation"] == [5, 10]


def test_evaluation_counts_each_image_once_for_any_number_of_workers() -> None:
    case = Case(config(epochs=1, batch_size=16))
    accuracies = [
        together({"run": case}, world_size)[0]["run"]["outcome"].progress.validation_accuracy for world_size in (1, 2)
    ]
    assert accuracies == pytest.approx([measured(alone(case)[0], case)[0]] * 2)


def evaluate_first(run: Run) -> None:
    run.prepare(run.build_model())
    run.evaluate()


@pytest.mark.parametrize(("stop_after", "loop"), [(4, train), (None, evaluate_first)])
def test_a_run_reports_its_start_before_it_requests_test_images(
    stop_after: int | None, loop: Callable[[Run], None], tmp_path: Path
) -> None:
    options, recorder = config(batch_size=16), Recorder()
    if stop_after is not None:  # Stop in the last step of an epoch; the resumed run then makes its evaluation.
        on_one_worker({"half": Case(options, stop_after=stop_after, folder=str(tmp_path))}, "")
    run = make_run(options, images(70), str(tmp_path), recorder)
    asked, held_out = [], run.batches.source.held_out

    def noted(part: Part) -> Iterator[LocalBatch]:
        asked.append(list(recorder.started_after))
        return held_out(part)

    run.batches.source.held_out = noted
    loop(run)
    assert asked[0] == [0 if stop_after is None else 5]
    assert recorder.started_after == asked[0]
