"""Unusual networks and optimizers: trained as by plain PyTorch, or refused in one sentence in the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import LoopFailed, RaytrainError
from raytrain.training.assembly import train_run
from raytrain.training.batches.batch import Batch
from raytrain.training.loop import train
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.loops_beside_torch import (
    NUM_IMAGES,
    NUM_IMAGES_WITH_EMPTY_SLICES,
    OPTIONS,
    check,
    linear,
    seeded,
)
from tests.helpers.memory_runs import Recorder, config, images, make_run, make_spec


class Fourier(nn.Module):
    """A filter in the frequency domain, whose weights are complex."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 5, dtype=torch.cdouble))
        self.head = nn.Linear(3 * 4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        filtered = torch.fft.irfft2(torch.fft.rfft2(images) * self.weight, s=(8, 8))
        return self.head(F.adaptive_avg_pool2d(filtered.tanh(), 2).flatten(1))


def fourier(num_classes: int, channels: int) -> nn.Module:
    return Fourier(num_classes).double()


def lazy(num_classes: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))


def one_logit(num_classes: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, 1))


def too_small(num_classes: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 4, 9), nn.Flatten(), nn.Linear(4, num_classes))


class Dictionary(nn.Module):
    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, num_classes))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(images)}


def trained_with(run: Any, network: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> list[nn.Module]:
    """Train with a closure, and return also the weights after each step, since a line search decides by the loss."""
    model = run.prepare(network)
    optimizer = run.prepare(make(model.parameters()))
    weights: list[Tensor] = []
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch.images), batch.labels)
                loss.backward()
                return loss

            optimizer.step(closure)
            weights.append(nn.utils.parameters_to_vector(map(_real, model.parameters())).detach())
    return [model, nn.ParameterList(weights)]


def _real(weight: Tensor) -> Tensor:
    return torch.view_as_real(weight) if weight.is_complex() else weight


def lbfgs(run: Any) -> list[nn.Module]:
    return trained_with(run, linear(), partial(torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"))


def complex_sgd(run: Any) -> list[nn.Module]:
    network = seeded(lambda: fourier(run.num_classes, 3))
    return trained_with(run, network, partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def test_they_train_as_in_plain_pytorch_on_one_and_on_two_workers(tmp_path: Path) -> None:
    for num_images in (NUM_IMAGES, NUM_IMAGES_WITH_EMPTY_SLICES):
        check((lbfgs, complex_sgd), tmp_path / str(num_images), num_images)


class Scaled(nn.Module):
    """Logits times a weight without dimensions, as a temperature is."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, num_classes))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images) * self.scale


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_weight_without_dimensions_learns_from_microbatches_what_it_learns_from_a_batch(
    precision: str, tmp_path: Path
) -> None:
    scales: list[float] = []
    for accumulate in (1, 3):
        options = config(model=f"{__name__}:Scaled", accumulate=accumulate, precision=precision)
        run = make_run(options, images(NUM_IMAGES), str(tmp_path / str(accumulate)), Recorder())
        train(run)
        scales.append(run.models.trained[0].scale.item())  # pyright: ignore
    assert scales[0] == pytest.approx(scales[1], abs=1e-5)
    assert scales[0] != 1


def lazy_weights(folder: str) -> list[Tensor]:
    run = make_run(config(batch_size=7, model=f"{__name__}:lazy"), images(NUM_IMAGES), folder, Recorder())
    torch.manual_seed(run.rank)  # as a loop may do that makes its network itself
    own = run.prepare(lazy(run.num_classes, 3).half())
    assert all(each.device.type == "cpu" and each.numel() for each in own.parameters())
    train(run)
    return [each.detach().clone() for each in (*run.models.trained[1].parameters(), *own.parameters())]


def test_lazy_layers_get_their_shapes_from_the_images(tmp_path: Path) -> None:
    one, other = run_in_processes(2, lazy_weights, str(tmp_path / "two"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    alone = lazy_weights(str(tmp_path / "one"))
    torch.testing.assert_close(one[:6], alone[:6], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (one_logit, r"run\.loss got logits of the shape \(7, 1\) for 7 images and 4 classes; give one row per image"),
        (Dictionary, r"run\.loss got a dict from the network; give it the logits"),
        (too_small, r"--model .*too_small cannot be trained on images of 8x8 pixels: RuntimeError: .*Kernel size"),
    ],
)
def test_a_network_that_the_built_in_loop_cannot_train_is_refused_in_the_first_step(
    network: Callable[..., nn.Module], sentence: str, tmp_path: Path
) -> None:
    options = config(batch_size=7, model=f"{__name__}:{network.__name__}")
    run = make_run(options, images(NUM_IMAGES), str(tmp_path), Recorder())
    with pytest.raises(RaytrainError, match=sentence):
        train_run(make_spec(options, images(NUM_IMAGES), str(tmp_path)), run)
    assert run.progress.step == 0


def without_closure(run: Run) -> None:
    model = run.prepare(linear())
    optimizer = run.prepare(torch.optim.LBFGS(model.parameters()))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()  # pyright: ignore[reportCallIssue]


def closure_without_loss(run: Run) -> None:
    model = run.prepare(linear())
    optimizer = run.prepare(torch.optim.LBFGS(model.parameters()))
    for epoch in run.epochs():
        for batch in epoch:

            def closure(batch: Batch = batch) -> None:
                optimizer.zero_grad()
                F.cross_entropy(model(batch.images), batch.labels).backward()

            optimizer.step(closure)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (without_closure, r"TypeError: LBFGS\.step\(\) missing 1 required positional argument: 'closure'"),
        (closure_without_loss, r"TypeError: float\(\) argument must be a string or a real number, not 'NoneType'"),
    ],
)
def test_a_closure_that_is_missing_or_wrong_ends_the_run_with_what_torch_says(
    loop: Callable[[Run], None], sentence: str, tmp_path: Path
) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    spec = dataclasses.replace(make_spec(OPTIONS, images(NUM_IMAGES), str(tmp_path)), loop=loop)
    line = rf"{Path(__file__).name}"
    with pytest.raises(LoopFailed, match=rf"its loop failed in its first step: {sentence} \(.*{line}") as failed:
        train_run(spec, run)
    assert "\n" not in str(failed.value)
