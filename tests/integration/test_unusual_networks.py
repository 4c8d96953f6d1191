"""Unusual networks and optimizers: trained as by plain PyTorch, or refused in one sentence in the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import RaytrainError, UsageError
from raytrain.training.assembly import train_run
from raytrain.training.loop import train
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.integration.test_exact import Recorder, config, images, make_run, make_spec

OPTIONS = config(batch_size=7, epochs=2, log_every=1, flip="none", translate=0)  # 6 steps per epoch
NUM_IMAGES = 38


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


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


def lbfgs(num_classes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, num_classes)).double()
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


def complex_sgd(num_classes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fourier(num_classes, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Made = Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]


def trained(make: Made, folder: str) -> list[Tensor]:
    """The weights after each step; the mean loss is part of them, since a line search decides by it."""
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
    model, optimizer = make(run.num_classes)
    model = run.prepare(model)
    optimizer = run.prepare(optimizer)
    seen: list[Tensor] = []
    for batch in run.batches(evaluate=dict):

        def loss(batch: Any = batch) -> Tensor:
            value = cross_entropy(model(batch.images), batch.labels)
            run.backward(value)
            return value

        if isinstance(optimizer, torch.optim.LBFGS):
            run.step(optimizer, loss)
        else:
            loss()
            run.step(optimizer)
        seen.append(weights_of(model))
    run.finish()
    return seen


def weights_of(model: nn.Module) -> Tensor:
    """A copy of all weights in a row; of complex ones, both parts."""
    real = [torch.view_as_real(each) if each.is_complex() else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in real])  # a copy


def trained_by_torch(make: Made, folder: str) -> list[Tensor]:
    """The same in plain PyTorch, on the images of one worker."""
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
    other = run.prepare(nn.Linear(1, 1))
    nothing = run.prepare(torch.optim.SGD(other.parameters(), lr=0.0))
    model, optimizer = make(run.num_classes)
    seen: list[Tensor] = []
    for batch in run.batches(evaluate=dict):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(model(batch.images), batch.labels)
            value.backward()
            return value

        optimizer.step(closure)  # pyright: ignore
        seen.append(weights_of(model))
        run.backward(other(batch.images.new_zeros(1, 1)).sum().to(torch.float64))
        run.step(nothing)
    run.finish()
    return seen


@pytest.mark.parametrize("make", [lbfgs, complex_sgd])
def test_it_trains_as_in_plain_pytorch_on_one_and_on_two_workers(make: Made, tmp_path: Path) -> None:
    wanted = trained_by_torch(make, str(tmp_path / "torch"))
    for found in (trained(make, str(tmp_path / "one")), *run_in_processes(2, trained, make, str(tmp_path / "two"))):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)


def lazy_weights(folder: str) -> list[Tensor]:
    run = make_run(config(batch_size=7, model=f"{__name__}:lazy"), images(NUM_IMAGES), folder, Recorder())
    train(run)
    own = run.prepare(lazy(run.num_classes, 3))  # one that a loop makes itself, after the seeds of a step
    assert all(each.device.type == "cpu" and each.numel() for each in own.parameters())
    return [each.detach().clone() for each in (*run.models.trained[0].parameters(), *own.parameters())]


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
    model, optimizer = lbfgs(run.num_classes)
    run.prepare(model)
    run.prepare(optimizer)
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)


def closure_without_loss(run: Run) -> None:
    model, optimizer = lbfgs(run.num_classes)
    run.prepare(model)
    run.prepare(optimizer)
    for batch in run.batches():
        run.step(optimizer, lambda batch=batch: run.backward(cross_entropy(model(batch.images), batch.labels)))  # pyright: ignore


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (without_closure, r"LBFGS computes the loss several times a step; call run\.step\(optimizer, closure\)"),
        (closure_without_loss, r"The closure of run\.step returns no loss"),
    ],
)
def test_a_closure_that_is_missing_or_wrong_is_refused(
    loop: Callable[[Run], None], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        loop(make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder()))
