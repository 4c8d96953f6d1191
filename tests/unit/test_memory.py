"""Out of memory: the number of microbatches is found by trial or in mid-run, and the weights stay the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import raytrain
from raytrain import Run, UsageError
from raytrain.errors import OutOfMemory
from raytrain.monitor.events import Note
from tests.helpers.folder_runs import FolderRun, folder_run, largest_difference, train_here
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.small_runs import weights

pytestmark = pytest.mark.not_quick

LARGEST = 5
"""Images that the small networks here can compute at once."""
LACKS_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
OF_LIBRARIES = [
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported later."),
    RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
]


class Limited(nn.Module):
    """A network without batch norm whose memory suffices for a few images."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(images) > LARGEST:
            raise LACKS_MEMORY
        return self.head(self.conv(images).relu().mean(dim=(2, 3)))


def limited(num_classes: int, channels: int) -> nn.Module:
    return Limited(num_classes, channels)


def fails_later(run: Run) -> None:
    """The built-in loop, whose memory does not suffice for a whole batch from the seventh step on."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            for microbatch in batch.microbatches():
                if batch.step >= 6 and len(microbatch.labels) > LARGEST:
                    raise LACKS_MEMORY
                loss = run.loss(model(microbatch.images), microbatch.targets)
                loss.backward()
                run.log(loss=loss)
            optimizer.step()


MODEL = "tests.unit.test_memory:limited"
SIMPLE = "tests.helpers.memory_runs:network_without_norm"


def microbatches_asked_for(run: FolderRun) -> int | None:
    """Return the number of microbatches that a run asks for; None if it trains."""
    try:
        train_here(run)
    except OutOfMemory as error:
        return error.accumulate
    return None


@pytest.mark.parametrize(("batch_size", "number"), [(5, None), (6, 2), (20, 4), (21, 8)])
def test_the_fewest_microbatches_that_fit_are_found(
    batch_size: int, number: int | None, images: Path, tmp_path: Path
) -> None:
    options = {"model": MODEL, "batch_size": batch_size, "accumulate": "auto", "epochs": 1}
    assert microbatches_asked_for(folder_run(images, tmp_path, "run", **options)) == number


@pytest.mark.parametrize("loop", [None, fails_later], ids=["in the trial", "in a step"])
@pytest.mark.parametrize("error", OF_LIBRARIES, ids=str)
def test_the_libraries_of_a_gpu_may_lack_memory_too(
    error: Exception, loop: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.test_memory.LACKS_MEMORY", error)
    options = {"model": MODEL if loop is None else SIMPLE, "batch_size": 8, "accumulate": "auto"}
    assert microbatches_asked_for(folder_run(images, tmp_path, "run", loop=loop, **options)) == 2


def test_the_trial_with_labels_is_not_taken_for_a_loop_that_does_not_mix_them(images: Path, tmp_path: Path) -> None:
    _, recorder = train_here(folder_run(images, tmp_path, "run", model=SIMPLE, accumulate="auto", mixup=0.2, epochs=1))
    assert not [event for event in recorder.events if isinstance(event, Note)]


def test_all_workers_ask_for_what_the_one_with_the_most_images_needs(images: Path, tmp_path: Path) -> None:
    run = folder_run(images, tmp_path, "run", model=MODEL, accumulate="auto", worker_load=(1.0, 3.0), batch_size=8)
    assert run_in_processes(2, microbatches_asked_for, run) == [2, 2]


def test_a_single_image_that_does_not_fit_is_told(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.test_memory.LARGEST", 0)
    with pytest.raises(UsageError, match="does not suffice for a single image; use --gradient-checkpointing"):
        train_here(folder_run(images, tmp_path, "run", model=MODEL, accumulate="auto"))


def test_an_evaluation_that_does_not_fit_is_told_as_one(images: Path, tmp_path: Path) -> None:
    def evaluate(run: Run) -> None:
        run.prepare(run.build_model())
        for epoch in run.epochs(evaluate=out_of_memory):
            for _ in epoch:
                run.evaluate()

    def out_of_memory() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(UsageError, match="does not suffice for its images of an evaluation"):
        train_here(folder_run(images, tmp_path, "run", loop=evaluate))


def too_large(run: Run) -> None:
    run.prepare(run.build_model())
    for epoch in run.epochs():
        for _ in epoch:
            torch.empty(2**60, dtype=torch.uint8)


def test_a_cpu_without_memory_asks_for_microbatches_and_blames_no_network(images: Path, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="for a global batch at once; compute it with --accumulate 2"):
        train_here(folder_run(images, tmp_path, "run", loop=too_large))


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_a_run_starts_in_as_many_microbatches_as_fit_with_the_same_weights(
    backend: Literal["local", "ray"], images: Path, tmp_path: Path
) -> None:
    by_number, _ = train_here(folder_run(images, tmp_path, "number", model=MODEL, epochs=1, accumulate=4))
    by_trial = folder_run(images, tmp_path, "trial", model=MODEL, epochs=1, accumulate="auto", workers=1).config
    result = raytrain.train(dataclasses.replace(by_trial, backend=backend))
    assert result.status == "finished"
    assert '"accumulate": 4,' in (tmp_path / "trial" / "config.json").read_text()
    assert largest_difference(by_number, weights(result)) < 1e-10


def test_a_run_that_meets_its_limit_later_goes_on_from_its_checkpoint(images: Path, tmp_path: Path) -> None:
    undisturbed, _ = train_here(folder_run(images, tmp_path, "undisturbed", model=SIMPLE))
    run = folder_run(images, tmp_path, "run", model=SIMPLE, loop=fails_later, checkpoint_every=("1ep", "2st"))
    with pytest.raises(OutOfMemory, match="for a global batch at once; compute it with --accumulate 2"):
        train_here(run)
    assert microbatches_asked_for(dataclasses.replace(run, config=dataclasses.replace(run.config, accumulate=2))) == 4
    again, recorder = train_here(dataclasses.replace(run, config=dataclasses.replace(run.config, accumulate=4)))
    assert [row.step for row in recorder.rows if row.kind == "step"] == [7, 8, 9, 10]
    assert largest_difference(undisturbed, again) < 1e-10
