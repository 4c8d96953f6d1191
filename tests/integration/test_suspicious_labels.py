"""Wrong labels that a run finds while it trains: which draws count, on any number of workers, over a resume."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.training.loop import train
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, trained

NUM_IMAGES = 70


def margins(
    folder: str, loop: Callable[[Run], None] = train, stop_after: int | None = None, **options: Any
) -> dict[str, Tensor]:
    """Train in ``folder``, and return the sums of all workers' draws."""
    run = make_run(config(**options), images(NUM_IMAGES), folder, Recorder(stop_after))
    trained(run, loop)
    return run.margins.joined_state()


def on_workers(num_workers: int, *stops: int | None) -> dict[str, Tensor]:
    """Train on a number of workers, resuming after each stop."""
    with tempfile.TemporaryDirectory() as folder:
        for stop in stops:
            result = run_in_processes(num_workers, margins, folder, train, stop)
    return result[0]  # pyright: ignore[reportPossiblyUnboundVariable]


def own(step: Callable[[Run, Any, Any], Tensor]) -> Callable[[Run], None]:
    """Return a loop of the user's own whose ``step`` computes the loss of a batch with a network."""

    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        for epoch in run.epochs():
            for batch in epoch:
                optimizer.zero_grad()
                step(run, model, batch).backward()
                optimizer.step()

    return loop


def with_loss(run: Run, model: Any, batch: Any) -> Tensor:
    pixels, labels = batch
    return run.loss(model(pixels), labels)


def with_accuracy(run: Run, model: Any, batch: Any) -> Tensor:
    logits = model(batch.images)
    run.log(accuracy=run.accuracy(logits, batch))
    return F.cross_entropy(logits, batch.labels)


def with_all_and_twice(run: Run, model: Any, batch: Any) -> Tensor:
    logits = model(batch.images)
    loss = run.loss(logits, batch.labels)
    run.show(batch, logits)
    run.accuracy(-logits, batch)
    return run.loss(logits, batch.targets) + 0 * loss


def in_halves(run: Run, model: Any, batch: Any) -> Tensor:
    logits, middle = model(batch.images), len(batch.labels) // 2
    return run.loss(logits[:middle], batch.labels[:middle]) + run.loss(logits[middle:], batch.labels[middle:])


@pytest.mark.parametrize("step", [with_loss, with_accuracy, with_all_and_twice, in_halves])
def test_each_draw_counts_once_whichever_call_has_its_logits(
    step: Callable[[Run, Any, Any], Tensor], tmp_path: Path
) -> None:
    found = margins(str(tmp_path / "own"), own(step))
    assert found["sums"][0].tolist() == [2] * NUM_IMAGES
    if step is not in_halves:  # whose loss is another one
        torch.testing.assert_close(found["sums"], margins(str(tmp_path / "built-in"), own(with_loss))["sums"])


def test_sums_are_those_of_the_logits(tmp_path: Path) -> None:
    expected = torch.zeros(3, NUM_IMAGES)

    def step(run: Run, model: Any, batch: Any) -> Tensor:
        logits = model(batch.images)
        for row, label, sample in zip(logits.detach(), batch.labels, batch.samples, strict=True):
            others = [value for index, value in enumerate(row) if index != label]
            loss = F.cross_entropy(row[None], label[None])
            expected[:, sample] += torch.tensor([1, row[label] - max(others), loss])
        return run.loss(logits, batch.labels)

    found = margins(str(tmp_path), own(step), label_smoothing=0.1)  # of which the loss here knows nothing
    torch.testing.assert_close(found["sums"], expected, rtol=1e-4, atol=1e-4)


def mixed(run: Run, model: Any, batch: Any) -> Tensor:
    targets = F.one_hot(batch.labels, 4).double()
    logits = model((batch.images + batch.images.flip(0)) / 2)
    loss = run.loss(logits, (targets + targets.flip(0)) / 2)
    run.accuracy(logits, batch)
    return loss


@pytest.mark.parametrize(("loop", "options"), [(train, {"mixup": 0.2}), (train, {"cutmix": 1.0}), (own(mixed), {})])
def test_mixed_images_have_no_margin(loop: Callable[[Run], None], options: dict[str, Any], tmp_path: Path) -> None:
    assert margins(str(tmp_path), loop, **options) == {}


def test_an_evaluation_counts_as_nothing(tmp_path: Path) -> None:
    def step(run: Run, model: Any, batch: Any) -> Tensor:
        for measured in run.evaluation_batches():
            run.accuracy(model(measured.images), measured)
        return F.cross_entropy(model(batch.images), batch.labels)

    assert margins(str(tmp_path), own(step)) == {}


def test_microbatches_count_like_whole_batches(tmp_path: Path) -> None:
    assert margins(str(tmp_path), accumulate=3)["sums"][0].tolist() == [2] * NUM_IMAGES


def test_several_workers_and_a_resume_in_an_epoch_find_the_same(tmp_path: Path) -> None:
    alone = margins(str(tmp_path))
    assert alone["sums"][0].tolist() == [2] * NUM_IMAGES
    found = on_workers(3, 3, None)
    torch.testing.assert_close(found["sums"], alone["sums"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["rivals"], alone["rivals"])
