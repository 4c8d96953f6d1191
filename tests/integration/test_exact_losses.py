"""After ``loss.backward()`` each gradient is that of the global batch in plain PyTorch, on any number of workers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from raytrain.training.batches.batch import Batch
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import config
from tests.helpers.own_loops import OPTIONS, WIDTH, TwoPaths, assert_same_weights, cross_entropy, fit, train_loop

Losses = Callable[[Run, nn.Sequential, Batch], Sequence[Tensor]]
"""The losses of a batch, which a loop backpropagates one after the other."""
CLASS_WEIGHTS = torch.tensor([0.1, 2.0, 1.0, 5.0], dtype=torch.float64)


def first_weight(model: nn.Module) -> Tensor:
    return next(model.parameters())


def mean(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    return [cross_entropy(model, batch)]


def mean_of_own(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    return [(model(batch.images) ** 2).sum(dim=1).mean()]


def mean_by_hand(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    return [F.cross_entropy(model(batch.images), batch.labels, reduction="sum") / len(batch.labels)]


def image_by_image(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    pairs = zip(batch.images, batch.labels, strict=True)
    return [torch.stack([F.cross_entropy(model(image[None]), label[None]) for image, label in pairs]).mean()]


def two_means(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    logits = model(batch.images)
    return [0.7 * F.cross_entropy(logits, batch.labels) + 0.3 * F.cross_entropy(logits, (batch.labels + 1) % 4)]


def soft_targets(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    return [F.cross_entropy(model(batch.images), torch.full((len(batch.labels), 4), 0.25, dtype=torch.float64))]


def penalised(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    return [cross_entropy(model, batch) + 0.1 * first_weight(model).square().sum()]


def anchored(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    weight = first_weight(model)
    return [cross_entropy(model, batch) + (weight - torch.ones_like(weight)).square().sum()]


def penalised_alone(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    """A penalty with a backward of its own, before that of the images."""
    return [0.1 * first_weight(model).square().sum(), cross_entropy(model, batch)]


def several(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    """Two losses of one graph, one of which leaves the last layer out."""
    features = model[:3](batch.images)
    return [features.square().sum(dim=1).mean(), F.cross_entropy(model[3](features), batch.labels)]


def penalised_gradients(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    images = batch.images.detach().requires_grad_()
    [slopes] = torch.autograd.grad(model(images).logsumexp(dim=1).sum(), images, create_graph=True)
    return [cross_entropy(model, batch) + slopes.flatten(1).square().sum(dim=1).mean()]


def checkpointed(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    features: Any = checkpoint(model[:3], batch.images, use_reentrant=False)
    return [F.cross_entropy(model[3](features), batch.labels)]


def of_classes(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    losses = F.cross_entropy(model(batch.images), batch.labels, CLASS_WEIGHTS, reduction="sum")
    hits = (batch.labels == 1).sum()  # a whole number
    run.log(hits=run.mean(hits, len(batch.labels)))
    return [run.mean(losses, CLASS_WEIGHTS[batch.labels].sum())]


def of_classes_in_plain_torch(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    return [F.cross_entropy(model(batch.images), batch.labels, CLASS_WEIGHTS)]


def without_a_class(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    losses = F.cross_entropy(model(batch.images), batch.labels, ignore_index=2, reduction="sum")
    return [run.mean(losses, (batch.labels != 2).sum()), 0.1 * first_weight(model).square().sum()]


def without_a_class_in_plain_torch(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    used = max(int((batch.labels != 2).sum()), 1)  # torch's own mean of no image is NaN
    losses = F.cross_entropy(model(batch.images), batch.labels, ignore_index=2, reduction="sum")
    return [losses / used, 0.1 * first_weight(model).square().sum()]


def contrasted(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    features, labels = run.gather(F.normalize(model(batch.images))), run.gather(batch.labels)
    return [similarity(features, labels)]


def contrasted_in_plain_torch(run: Run, model: nn.Sequential, batch: Batch) -> Sequence[Tensor]:
    return [similarity(F.normalize(model(batch.images)), batch.labels)]


def similarity(features: Tensor, labels: Tensor) -> Tensor:
    same = (labels[:, None] == labels).to(features.dtype)
    return -((features @ features.T / 0.5).log_softmax(dim=1) * same).sum(dim=1).mean()


IN_PLAIN_TORCH: dict[Losses, Losses] = {
    **{
        each: each
        for each in (
            *(mean, mean_of_own, mean_by_hand, image_by_image, two_means, soft_targets),
            *(penalised, anchored, penalised_alone, several, penalised_gradients, checkpointed),
        )
    },
    of_classes: of_classes_in_plain_torch,
    without_a_class: without_a_class_in_plain_torch,
    contrasted: contrasted_in_plain_torch,
}


def network(run: Run) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, run.num_classes))


def whole(run: Run, batch: Batch) -> Batch:
    """The global batch, on each worker."""
    images, labels = run.gather(batch.images), run.gather(batch.labels)
    return dataclasses.replace(batch, images=images, labels=labels, num_used=len(labels))


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def gradients_in_plain_torch(run: Run, model: nn.Sequential, losses_of: Losses, batch: Batch) -> list[Tensor]:
    """The gradients of a copy of the network for a global batch."""
    reference = copy.deepcopy(model)
    reference.zero_grad()
    losses = losses_of(run, reference, batch)
    for loss in losses:
        loss.backward(retain_graph=len(losses) > 1)
    return gradients_of(reference)


def check_losses(folder: str) -> None:
    """Train an epoch with each loss, and compare the gradients of each step."""
    for losses_of, plain in IN_PLAIN_TORCH.items():

        def loop(run: Run, losses_of: Losses = losses_of, plain: Losses = plain) -> None:
            model: nn.Sequential = run.prepare(network(run))
            optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            for epoch in run.epochs():
                for batch in epoch:
                    wanted = gradients_in_plain_torch(run, model, plain, whole(run, batch))
                    optimizer.zero_grad()
                    losses = losses_of(run, model, batch)
                    for loss in losses:
                        loss.backward(retain_graph=len(losses) > 1)
                    torch.testing.assert_close(gradients_of(model), wanted, rtol=1e-10, atol=1e-12)
                    optimizer.step()

        train_loop(loop, f"{folder}/{losses_of.__name__}", dataclasses.replace(OPTIONS, epochs=1))


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_global_batch_for_losses_of_many_forms(num_workers: int, tmp_path: Path) -> None:
    run_in_processes(num_workers, check_losses, str(tmp_path))


def check_microbatches(folder: str) -> None:
    """Gradients of microbatches add up, without a division, to those of the whole batch, sent each time and once."""

    def loop(run: Run, sums_once: bool) -> None:
        model: nn.Sequential = run.prepare(network(run))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs():
            for batch in epoch:
                wanted = gradients_in_plain_torch(run, model, penalised, whole(run, batch))
                optimizer.zero_grad()
                for microbatch in batch.microbatches():
                    with run.no_sync(sums_once and not microbatch.is_last):
                        penalised(run, model, microbatch)[0].backward()
                torch.testing.assert_close(gradients_of(model), wanted, rtol=1e-10, atol=1e-12)
                optimizer.step()

    options = dataclasses.replace(OPTIONS, accumulate=3)
    for sums_once in (False, True):
        train_loop(partial(loop, sums_once=sums_once), f"{folder}/{sums_once}", options)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_gradients_of_microbatches_add_up_to_those_of_the_global_batch(num_workers: int, tmp_path: Path) -> None:
    run_in_processes(num_workers, check_microbatches, str(tmp_path))


def count_collectives(folder: str) -> list[int]:
    """Return how many collectives the gradients of each step took, with three microbatches."""
    numbers: list[int] = []

    def loop(run: Run) -> None:
        model: nn.Sequential = run.prepare(network(run))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs():
            for batch in epoch:
                optimizer.zero_grad()
                with profile(activities=[ProfilerActivity.CPU]) as recorded:
                    for microbatch in batch.microbatches():
                        with run.no_sync(not microbatch.is_last):
                            cross_entropy(model, microbatch).backward()
                numbers.append(sum(each.count for each in recorded.key_averages() if each.key == "gloo:all_reduce"))
                optimizer.step()

    train_loop(loop, folder, dataclasses.replace(OPTIONS, accumulate=3))
    return numbers


def test_gradients_of_microbatches_travel_once_a_step(tmp_path: Path) -> None:
    for numbers in run_in_processes(2, count_collectives, str(tmp_path)):
        assert numbers and set(numbers) == {1}


def steps_in_each_microbatch(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    for microbatch in batch.microbatches():
        optimizer.zero_grad()
        cross_entropy(model, microbatch).backward()
        optimizer.step()


def leaves_the_microbatches(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    for microbatch in batch.microbatches():
        cross_entropy(model, microbatch).backward()
        break
    optimizer.step()


def leaves_a_layer_out_of_a_microbatch(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    for step, microbatch in enumerate(batch.microbatches()):
        network: Any = model
        network.step = step
        F.cross_entropy(network(microbatch.images)["logits"], microbatch.labels).backward()
    optimizer.step()


def sums_in_the_step(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    """Leave all gradients to the optimizer's step, which sums them first."""
    optimizer.zero_grad()
    for microbatch in batch.microbatches():
        with run.no_sync():
            cross_entropy(model, microbatch).backward()
    optimizer.step()


def leaves_a_layer_out_of_the_last_microbatch(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    for microbatch in batch.microbatches():
        network: Any = model
        network.step = 0 if microbatch.is_last else 1
        with run.no_sync(not microbatch.is_last):
            F.cross_entropy(network(microbatch.images)["logits"], microbatch.labels).backward()
    optimizer.step()


def steps_every_second_batch(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    """Add up the gradients of two batches, which do not travel before the second; freeze a layer in between."""
    first = next(iter(model.parameters()))
    for microbatch in batch.microbatches():
        with run.no_sync(batch.step % 2 == 0 or not microbatch.is_last):
            first.requires_grad_(batch.step % 2 == 0 or microbatch.is_last)
            cross_entropy(model, microbatch).backward()
    first.requires_grad_(True)
    if batch.step % 2:
        optimizer.step()
        optimizer.zero_grad()


StepOf = Callable[[Run, nn.Module, Any, Batch], None]
PARTS: tuple[StepOf, ...] = (
    steps_in_each_microbatch,
    leaves_the_microbatches,
    leaves_a_layer_out_of_a_microbatch,
    leaves_a_layer_out_of_the_last_microbatch,
    sums_in_the_step,
    steps_every_second_batch,
)


def train_in_microbatches(folder: str) -> dict[str, list[Tensor]]:
    options = dataclasses.replace(OPTIONS, accumulate=2)
    weights: dict[str, list[Tensor]] = {}
    for step_of in PARTS:

        def loop(run: Run, step_of: StepOf = step_of) -> None:
            has_paths = step_of.__name__.startswith("leaves_a_layer")
            model = run.prepare(TwoPaths(run.num_classes) if has_paths else run.build_model())
            optimizer = run.prepare(run.build_optimizer(model))
            for epoch in run.epochs(evaluate=dict if has_paths else None):
                for batch in epoch:
                    step_of(run, model, optimizer, batch)

        weights[step_of.__name__] = train_loop(loop, f"{folder}/{step_of.__name__}", options).weights
    return weights


def test_loops_over_microbatches_end_with_the_same_weights_on_any_number_of_workers(tmp_path: Path) -> None:
    alone = train_in_microbatches(str(tmp_path / "one"))
    for together in run_in_processes(3, train_in_microbatches, str(tmp_path / "three")):
        for name, weights in together.items():
            assert_same_weights(name, weights, alone[name], 1e-10)


def check_hooks(folder: str) -> None:
    """A hook after the accumulation gets the gradient of the global batch, also if it adds up to one before."""

    def loop(run: Run) -> None:
        model: nn.Sequential = run.prepare(network(run))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        got: dict[Tensor, list[Tensor]] = {each: [] for each in model.parameters()}
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda weight: got[weight].append(weight.grad.clone()))
        for epoch in run.epochs():
            for batch in epoch:
                wanted = gradients_in_plain_torch(run, model, mean, whole(run, batch))
                optimizer.zero_grad()
                for number in (1, 2):
                    cross_entropy(model, batch).backward()
                    assert [len(each) for each in got.values()] == [2 * batch.step + number] * 4
                    seen = [each[-1] / number for each in got.values()]
                    torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-12)
                optimizer.step()

    train_loop(loop, folder)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_hooks_after_the_accumulation_get_the_gradient_of_the_global_batch(num_workers: int, tmp_path: Path) -> None:
    run_in_processes(num_workers, check_hooks, str(tmp_path))


class Recording(torch.optim.SGD):
    """Keeps a copy of the gradients that it steps with."""

    def step(self, closure: Any = None) -> Any:
        self.got = [each.grad.clone() for group in self.param_groups for each in group["params"]]
        return super().step(closure)


def check_scaled(folder: str) -> None:
    """Two optimizers step with gradients that GradScaler has divided by the scale, which is 1 in float32."""

    def loop(run: Run, precision: str) -> None:
        model: nn.Sequential = run.prepare(network(run))
        head, body = model[3], model[1]
        optimizers = [run.prepare(Recording(each.parameters(), lr=0.1)) for each in (head, body)]
        scaler = run.prepare(torch.amp.GradScaler(run.device.type, init_scale=1024.0, enabled=precision == "float16"))
        for epoch in run.epochs():
            for batch in epoch:
                wanted = gradients_in_plain_torch(run, model, mean, whole(run, batch))
                model.zero_grad()
                for _ in range(2):  # halves, which add up
                    scaler.scale(cross_entropy(model, batch) / 2).backward()
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                torch.testing.assert_close(gradients_of(model), wanted, rtol=0.02, atol=2e-3)
                torch._foreach_mul_(gradients_of(model), 2.0)  # pyright: ignore[reportPrivateImportUsage]
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                got = [*optimizers[1].got, *optimizers[0].got]
                torch.testing.assert_close(got, wanted, rtol=0.02, atol=2e-3)

    for precision in ("float32", "float16"):
        options = config(batch_size=7, precision=precision)
        train_loop(partial(loop, precision=precision), f"{folder}/{precision}", options)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_scaled_gradients_are_exact_in_the_loop_and_in_each_of_two_optimizers(num_workers: int, tmp_path: Path) -> None:
    run_in_processes(num_workers, check_scaled, str(tmp_path))


def train_with_overflows(folder: str) -> tuple[list[Tensor], list[float]]:
    """Train with a scale that is too large for the first steps; return the weights and the scale after each step."""
    scales: list[float] = []

    def loop(run: Run) -> None:
        model = run.prepare(network(run))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = run.prepare(torch.amp.GradScaler(run.device.type, init_scale=2.0**21))
        for epoch in run.epochs():
            for batch in epoch:
                optimizer.zero_grad()
                scaler.scale(cross_entropy(model, batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())

    trained = train_loop(loop, folder, config(batch_size=7, precision="float16"))
    return trained.weights, scales


def test_a_step_that_overflows_is_left_out_on_all_workers(tmp_path: Path) -> None:
    (weights, scales), (others, other_scales) = run_in_processes(2, train_with_overflows, str(tmp_path))
    assert scales == other_scales
    assert 2.0**21 > scales[0] > scales[-1] == scales[-2] > 1  # first steps are left out, later ones are not
    assert_same_weights("float16", weights, others, 0.0)
    assert all(bool(each.isfinite().all()) for each in weights)


def drops_a_layer_on_one_worker(folder: str) -> list[Tensor]:
    def loop(run: Run) -> None:
        model = run.prepare(TwoPaths(run.num_classes))
        optimizer = run.prepare(run.build_optimizer(model))
        before = model.extra.weight.detach().clone()
        for epoch in run.epochs(evaluate=dict):
            for batch in epoch:
                model.step = run.rank
                optimizer.zero_grad()
                F.cross_entropy(model(batch.images)["logits"], batch.labels).backward()
                optimizer.step()
        assert not torch.equal(model.extra.weight, before)

    return train_loop(loop, folder).weights


def test_a_layer_that_only_some_workers_use_stays_the_same_on_all(tmp_path: Path) -> None:
    first, other = run_in_processes(2, drops_a_layer_on_one_worker, str(tmp_path))
    assert_same_weights("two paths", first, other, 0.0)


def fits_layers_of_one_type(run: Run) -> None:
    """A network whose weights have two types, which travel apart."""
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.Linear(8, run.num_classes)))
    model[1].to(torch.float32)
    model[1].register_forward_pre_hook(lambda layer, given: given[0].float())
    model[2].register_forward_pre_hook(lambda layer, given: given[0].double())
    fit(run, model, run.prepare(torch.optim.SGD(model.parameters(), lr=0.1)))


def train_of_two_types(folder: str) -> list[Tensor]:
    return train_loop(fits_layers_of_one_type, folder).weights


def test_weights_of_two_types_train_as_on_one_worker(tmp_path: Path) -> None:
    alone = train_of_two_types(str(tmp_path / "one"))
    assert {each.dtype for each in alone} == {torch.float32, torch.float64}
    for together in run_in_processes(2, train_of_two_types, str(tmp_path / "two")):
        assert_same_weights("two types", together, alone, 1e-6)
