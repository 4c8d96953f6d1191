"""Loops in plain PyTorch: the same weights and metrics on 1 and 2 workers, and after a stop and a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, parametrize
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raytrain.storage.open import open_store
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.evaluation import evaluate
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder
from tests.helpers.own_loops import (
    OPTIONS,
    WIDTH,
    Loop,
    TwoPaths,
    assert_same_weights,
    cross_entropy,
    learn,
    linear,
    prepared,
    to_the_end,
    train_all,
    train_loop,
)


def clipping(run: Run) -> None:
    """Clips by the norm and by the value, which must be those of the global batch's gradients."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            clip_grad_norm_(model.parameters(), 0.1) if batch.step % 2 else clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()


def own_schedule(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.RMSprop(model.parameters()))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + batch.step)
            learn(model, optimizer, batch)


def distillation(run: Run) -> None:
    teacher = run.build_model().double().eval()
    model = run.prepare(linear(run))
    optimizer = run.prepare(torch.optim.Adam(model.parameters(), lr=0.01))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            with torch.no_grad():
                target = teacher(batch.images).softmax(dim=1)
            optimizer.zero_grad()
            F.kl_div(model(batch.images).log_softmax(dim=1), target, reduction="batchmean").backward()
            optimizer.step()


def several_models(run: Run) -> None:
    models = [run.prepare(run.build_model()), run.prepare(linear(run))]
    optimizers = [run.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    for epoch in run.epochs():
        for batch in epoch:
            for model, optimizer in zip(models, optimizers, strict=True):
                learn(model, optimizer, batch)


def averaged_weights(run: Run) -> None:
    model = run.prepare(run.build_model())
    average = run.prepare(
        AveragedModel(run.build_model(), multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    )
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs(evaluate=lambda: evaluate(run, average)):
        for batch in epoch:
            learn(model, optimizer, batch)
            average.update_parameters(model)


def metrics_of_its_own(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            loss = F.cross_entropy(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = logits.argmax(dim=1) == batch.labels
            in_two = (logits.topk(2).indices == batch.labels[:, None]).any(dim=1)
            run.log(loss=loss.item(), accuracy=right.double().mean(), in_two=in_two.double().mean())


def evaluation_of_its_own(run: Run) -> None:
    def worst_class() -> dict[str, float]:
        counts = torch.zeros(2, run.num_classes, dtype=torch.float64)  # correct and total images of each class
        for batch in run.evaluation_batches():
            right = model(batch.images).argmax(dim=1) == batch.labels
            counts += torch.stack(
                [torch.bincount(batch.labels[which], minlength=run.num_classes) for which in (right, slice(None))]
            )
        right, total = torch.tensor(run.total(counts.flatten())).view(2, -1)
        return {"accuracy": (right.sum() / total.sum()).item(), "worst_class": (right / total).min().item()}

    model, optimizer = prepared(run)
    for epoch in run.epochs(evaluate=worst_class):
        for batch in epoch:
            learn(model, optimizer, batch)
            if batch.step % 4 == 3:
                run.evaluate()  # in the middle of an epoch


def methods_and_layers_left_out(run: Run) -> None:
    """Train the network that was given to prepare, by its methods, with weight decay that unused layers don't get."""
    network = TwoPaths(run.num_classes)
    assert run.prepare(network) is network
    network.step = run.progress.step
    optimizer = run.prepare(torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            F.cross_entropy(network.head(network.encode(batch.images)), batch.labels).backward()
            optimizer.step()


def unfreezing(run: Run) -> None:
    """Train the head for two steps, then all layers, and a temperature of the loop's own."""
    model = run.prepare(TwoPaths(run.num_classes))
    temperature = nn.Parameter(torch.ones(()))
    run.prepare(nn.ParameterList([temperature]))
    optimizer = run.prepare(torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            model.body.requires_grad_(batch.step >= 2)
            model.step = 0
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images)["logits"] * temperature, batch.labels).backward()
            optimizer.step()


def accumulates_over_batches(run: Run) -> None:
    """Adds up the gradients of four batches before each step of the optimizer."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            (cross_entropy(model, batch) / 4).backward()
            if batch.step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def scheduler_of_batches(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler = run.prepare(OneCycleLR(optimizer, 0.5, total_steps=13))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            learn(model, optimizer, batch)
            scheduler.step()


def scheduler_of_epochs(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler = run.prepare(ExponentialLR(optimizer, 0.5))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            learn(model, optimizer, batch)
        scheduler.step()


class Sum:
    """The sum of an epoch's losses, and the largest one, which weight its next losses."""

    total = largest = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total, "largest": self.largest}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total, self.largest = state["total"], state["largest"]


def changes_at_the_start_of_an_epoch(run: Run) -> None:
    """What an epoch changes before its first batch is not done again by a resume in its middle."""
    model, teacher = run.prepare(run.build_model()), run.prepare(run.build_model())
    kept = run.prepare(Sum())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    scheduler = run.prepare(ExponentialLR(optimizer, 0.9))
    for epoch in run.epochs(evaluate=dict):
        scheduler.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.state.clear()
        teacher.load_state_dict(model.state_dict())
        kept.total = 0.0
        for batch in epoch:
            logits = model(batch.images)
            distance = (logits - teacher(batch.images)).square().mean()
            loss = F.cross_entropy(logits, batch.labels) * (1 + 0.1 * kept.total) + distance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.total += run.total([loss.item() * batch.num_used])[0] / run.total([batch.num_used])[0]


def changes_in_place_at_the_start_of_an_epoch(run: Run) -> None:
    """The same of tensors that the loop changes in place, with a number of the optimizer's own beside them."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64)))
    for epoch in run.epochs(evaluate=dict):
        optimizer.param_groups[0]["lr"].mul_(0.5)
        for state in optimizer.state.values():
            if isinstance(state, dict):
                state["exp_avg"].zero_()
        for batch in epoch:
            learn(model, optimizer, batch)
        optimizer.state["epochs"] = epoch.number  # pyright: ignore[reportArgumentType]


def rate_in_a_tensor(run: Run) -> None:
    """A rate as torch advises it for compiled optimizers; two schedulers change the tensor in place."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64)))
    by_steps = run.prepare(ExponentialLR(optimizer, 0.9))
    by_epochs = run.prepare(ExponentialLR(optimizer, 0.5))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            learn(model, optimizer, batch)
            by_steps.step()
        by_epochs.step()


def sharpness_aware(run: Run) -> None:
    """Two backwards in a step: the gradients of the first move the weights to where those of the second are taken."""
    model = run.prepare(linear(run))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            ascents = [(each, 0.05 * each.grad) for each in model.parameters() if each.grad is not None]
            with torch.no_grad():
                for parameter, ascent in ascents:
                    parameter += ascent
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            with torch.no_grad():
                for parameter, ascent in ascents:
                    parameter -= ascent
            optimizer.step()


def steps_beside_its_losses(run: Run) -> None:
    """Three backwards before a step: of two losses, and of the distance from the first weights, which are prepared."""
    model = run.prepare(run.build_model())
    anchor = copy.deepcopy(model).eval().requires_grad_(False)
    run.prepare(anchor)
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            logits = model(batch.images)
            (0.01 * logits.square().sum(dim=1).mean()).backward(retain_graph=True)
            F.cross_entropy(logits, batch.labels).backward()
            pairs = zip(model.parameters(), anchor.parameters(), strict=True)
            (0.1 * torch.stack([(own - first).square().sum() for own, first in pairs]).sum()).backward()
            optimizer.step()


class Wrapping(torch.optim.Optimizer):
    """Goes back half of the way every third step, and shares groups with the optimizer that it wraps."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        super().__init__(wrapped.param_groups, {})
        self.wrapped = wrapped
        wrapped.param_groups = self.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        self.wrapped.step()
        for group in self.param_groups:
            for each in group["params"]:
                slow = self.state[each].setdefault("slow", each.clone())
                if group["count"] % 3 == 0:
                    each.copy_(slow.lerp_(each, 0.5))


class Several(torch.optim.Optimizer):
    """One optimizer for matrices and one for vectors, as if they were one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for each in parts for group in each.param_groups], {})
        self.parts = list(parts)

    def step(self, closure: Any = None) -> Any:
        for each in self.parts:
            each.step()


def fit_with_scheduler(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.prepare(optimizer)
    scheduler = run.prepare(CosineAnnealingLR(optimizer, T_max=run.plan.num_steps))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            learn(model, optimizer, batch)
            scheduler.step()


def wraps_an_optimizer(run: Run) -> None:
    """A class that wraps another optimizer, whose state is its own, under a scheduler."""
    model = run.prepare(linear(run))
    fit_with_scheduler(run, model, Wrapping(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))


def several_as_one(run: Run) -> None:
    model = run.prepare(linear(run))
    matrix, vector = model.parameters()
    parts = torch.optim.SGD([matrix], lr=0.1, momentum=0.9), torch.optim.AdamW([vector], lr=0.01)
    fit_with_scheduler(run, model, Several(*parts))


class Rates:
    """A scheduler that is none of torch's: it sets the rate of the first step when it is made."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.number = optimizer, 0
        self.set()

    def set(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.number)

    def step(self) -> None:
        self.number += 1
        self.set()

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def scheduler_of_its_own(run: Run) -> None:
    model = run.prepare(run.build_model())
    rates = run.prepare(Rates(optimizer := run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            learn(model, optimizer, batch)
            rates.step()


def rate_by_an_evaluation(run: Run) -> None:
    """Halves its rate by what it measures after each epoch, and after a stop, which is in no checkpoint."""
    model, optimizer = prepared(run)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=100.0)
    scheduler: Any = run.prepare(plateau)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
        scheduler.step(run.evaluate()["loss"])


class OfViews(nn.Module):
    """Drops features of each view of an image, and, if it joins two views that lie far apart, of their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 16), nn.Dropout(0.4), nn.Linear(16, 4)).double()
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 4)).double()

    def forward(self, pixels: Tensor, joins: bool = False) -> Tensor:
        features = self.layers(pixels)
        return self.head(features.unflatten(0, (2, -1)).mean(0) if joins else features)


def views_in_one_tensor(run: Run) -> None:
    """Gives a network with dropout two views of each image in one tensor: far apart, side by side, and joined."""
    model = run.prepare(OfViews())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            far_apart = torch.cat([batch.images, batch.images.flip(3)])
            side_by_side = batch.images.repeat_interleave(2, dim=0)
            loss = F.cross_entropy(model(far_apart), batch.labels.repeat(2))
            loss = loss + F.cross_entropy(model(side_by_side), batch.labels.repeat_interleave(2))
            loss = loss + F.cross_entropy(model(far_apart, joins=True), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


SAME_ON_ANY_WORKERS = (
    to_the_end,
    rate_by_an_evaluation,
    clipping,
    own_schedule,
    distillation,
    several_models,
    averaged_weights,
    metrics_of_its_own,
    evaluation_of_its_own,
    methods_and_layers_left_out,
    unfreezing,
    accumulates_over_batches,
    scheduler_of_batches,
    scheduler_of_epochs,
    changes_at_the_start_of_an_epoch,
    changes_in_place_at_the_start_of_an_epoch,
    scheduler_of_its_own,
    rate_in_a_tensor,
    sharpness_aware,
    steps_beside_its_losses,
    wraps_an_optimizer,
    several_as_one,
    views_in_one_tensor,
)


def mixup(run: Run) -> None:
    """Mixes the images of each worker by random numbers of its own, so that it depends on the number of workers."""
    model, optimizer = prepared(run)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            other, part = torch.randperm(len(batch.labels)), torch.rand(())
            logits = model(part * batch.images + (1 - part) * batch.images[other])
            losses = [F.cross_entropy(logits, labels) for labels in (batch.labels, batch.labels[other])]
            optimizer.zero_grad()
            (part * losses[0] + (1 - part) * losses[1]).backward()
            optimizer.step()


def two_optimizers_against_each_other(run: Run) -> None:
    """Train a generator and a critic."""
    generator = run.prepare(nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Unflatten(1, (3, 8, 8))))
    critic = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 1)))
    makes, judges = (run.prepare(torch.optim.Adam(model.parameters(), lr=0.001)) for model in (generator, critic))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            made = generator(torch.randn(len(batch.labels), 4, dtype=batch.images.dtype))
            critic_loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(batch.images)).mean()
            judges.zero_grad()
            critic_loss.backward()
            judges.step()
            makes.zero_grad()
            F.softplus(-critic(made)).mean().backward()  # gives gradients to the critic, too
            makes.step()
            run.log(critic_loss=critic_loss)


SAME_AFTER_A_STOP: tuple[Loop, ...] = (*SAME_ON_ANY_WORKERS, mixup, two_optimizers_against_each_other)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all loops on two workers without a stop."""
    return run_in_processes(2, train_all, list(SAME_AFTER_A_STOP), str(tmp_path_factory.mktemp("two")))[0]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results on one worker, where torch alone computes all gradients."""
    return train_all(list(SAME_ON_ANY_WORKERS), str(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("loop", SAME_ON_ANY_WORKERS)
def test_a_loop_computes_the_same_on_any_number_of_workers(
    loop: Callable[[Run], None], on_one: dict[str, Any], on_two: dict[str, Any]
) -> None:
    name = loop.__name__
    one, two = on_one[name], on_two[name]
    assert_same_weights(name, two["weights"], one["weights"], 1e-10)
    for ours, theirs in zip(two["rows"], one["rows"], strict=True):
        assert set(ours.metrics) == set(theirs.metrics)
        for what in ("step", "epoch", "samples_seen", "learning_rate", *ours.metrics):
            assert ours.value(what) == pytest.approx(theirs.value(what), abs=1e-9), what


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results on two workers that were stopped in the middle of the first epoch, and resumed."""
    folder = str(tmp_path_factory.mktemp("stopped"))
    stopped = run_in_processes(2, train_all, list(SAME_AFTER_A_STOP), folder, 3)[0]
    assert {result["outcome"].status for result in stopped.values()} == {"stopped"}
    steps = {name: result["outcome"].progress.step for name, result in stopped.items()}
    # Gradients that are being added up are in no checkpoint, so the stop waits for the next step of the optimizer.
    assert steps.pop("accumulates_over_batches") == 4 and set(steps.values()) == {4}
    return run_in_processes(2, train_all, list(SAME_AFTER_A_STOP), folder)[0]


@pytest.mark.parametrize("loop", SAME_AFTER_A_STOP)
def test_a_loop_ends_with_the_same_weights_after_a_stop_and_a_resume(
    loop: Callable[[Run], None], on_two: dict[str, Any], resumed: dict[str, Any]
) -> None:
    name = loop.__name__
    assert resumed[name]["outcome"].status == "finished"
    assert_same_weights(name, resumed[name]["weights"], on_two[name]["weights"], 0.0)


@pytest.mark.parametrize("option", [{"until": "accuracy=0"}, {"patience": 1, "best": "rank"}], ids=str)
def test_an_evaluation_after_a_stop_within_an_epoch_does_not_end_the_run(option: Any, tmp_path: Path) -> None:
    """A run without the stop would not have evaluated there."""

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs(lambda: {"rank": 1.0, "accuracy": 0.5}):
            for batch in epoch:
                learn(model, optimizer, batch)
            if run.progress.step % 6:
                run.evaluate()
                run.evaluate()

    options = replace(OPTIONS, **option)
    stopped = train_loop(loop, tmp_path, options, Recorder(stop_after=2))
    assert (stopped.outcome.progress.step, stopped.outcome.stop_reason) == (3, None)
    assert [row.step for row in stopped.rows("evaluation")] == [3, 3]
    steps = train_loop(loop, tmp_path, options).rows("evaluation")
    assert [row.step for row in steps] == ([6] if "until" in option else [6, 12])


def test_a_network_may_lose_its_parametrisation_after_it_was_measured(tmp_path: Path) -> None:
    """Its last checkpoint has the weights under both names: as they are now, and as they were measured."""

    def loop(run: Run) -> None:
        layer = parametrizations.weight_norm(nn.Linear(WIDTH, run.num_classes))
        model = run.prepare(nn.Sequential(nn.Flatten(), layer))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
        for epoch in run.epochs(lambda: evaluate(run, model)):
            for batch in epoch:
                learn(model, optimizer, batch)
        parametrize.remove_parametrizations(layer, "weight")

    outcome = train_loop(loop, tmp_path).outcome
    assert outcome.checkpoint is not None
    state = read_checkpoint(open_store(str(tmp_path)), outcome.checkpoint).state
    assert "1.weight" in state["model"] and "1.weight" not in state["model as measured"]


def test_autocast_is_on_again_after_a_step_whose_closure_fails(tmp_path: Path) -> None:
    seen: list[bool] = []

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)

        def closure(batch: Any, *, fails: bool) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            if fails:
                raise MemoryError
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            return loss

        for epoch in run.epochs():
            for batch in epoch:
                with pytest.raises(MemoryError):
                    optimizer.step(partial(closure, batch, fails=True))
                seen.append(torch.is_autocast_enabled("cpu"))
                optimizer.step(partial(closure, batch, fails=False))

    train_loop(loop, tmp_path, replace(OPTIONS, precision="bfloat16", epochs=1))
    assert seen == [True] * 18


def test_metrics_of_a_loop_are_in_the_history(on_two: dict[str, Any]) -> None:
    steps = [row for row in on_two["metrics_of_its_own"]["rows"] if row.kind == "step"]
    assert len(steps) == 12
    assert all(row.accuracy <= row.metrics["in_two"] <= 1 for row in steps)
    measured = [row for row in on_two["evaluation_of_its_own"]["rows"] if row.kind == "evaluation"]
    assert [row.step for row in measured] == [4, 6, 8, 12, 12]
    assert all(0 <= row.metrics["worst_class"] <= row.accuracy for row in measured)
    steps = [row for row in on_two["two_optimizers_against_each_other"]["rows"] if row.kind == "step"]
    assert [row.metrics["critic_loss"] > 0 for row in steps] == [True] * 12
    rates = [row.learning_rate for row in on_two["scheduler_of_epochs"]["rows"] if row.kind == "step"]
    assert rates == [0.5] * 6 + [0.25] * 6


@dataclass(slots=True)
class Count:
    number: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def test_an_object_with_slots_is_in_the_checkpoint(tmp_path: Path) -> None:
    numbers: list[int] = []

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        count = run.prepare(Count())
        for epoch in run.epochs():
            for batch in epoch:
                learn(model, optimizer, batch)
                count.number += 1
        numbers.append(count.number)

    train_loop(loop, tmp_path, recorder=Recorder(3))
    train_loop(loop, tmp_path)
    assert numbers == [4, 12]
