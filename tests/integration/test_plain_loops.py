"""Loops in plain PyTorch: on several workers they end with the weights that one process computes with whole batches.

Each loop is run by a worker's ``Run``, and once by a :class:`PlainRun`, which gives it whole global batches and nothing
else. 48 images in batches of 12, with a last one of 10 in some, divided evenly and unevenly, with unreadable images,
and over a stop and a resume on another number of workers.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from raytrain.monitor.events import Note
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Case, Recorder, config, images, make_run, plain_batches
from tests.helpers.plain_loops import NUM_CLASSES, STEPS, STEPS_PER_EPOCH, Loop, Normed, by_steps, entropy, mlp, steps

Tensors = list[dict[str, Tensor]]


class PlainRun:
    """What a loop sees of a run, for one process with whole global batches."""

    num_classes, rank, world_size = NUM_CLASSES, 0, 1

    def __init__(self, case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.run = make_run(case.options, images(case.num_samples), folder, Recorder())
        self.batches = list(plain_batches(self.run, images(case.num_samples, case.bad), (1.0,)))
        self.prepared: list[nn.Module] = []

    def prepare(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            self.prepared.append(thing.double())
        return thing

    def epochs(self, evaluate: object = None) -> Iterator[Any]:
        for number in range(0, len(self.batches), STEPS_PER_EPOCH):
            steps = range(number, min(number + STEPS_PER_EPOCH, len(self.batches)))
            yield PlainEpoch(number // STEPS_PER_EPOCH, [self._batch(step) for step in steps])

    def _batch(self, step: int) -> Any:
        ((pixels, labels),) = self.batches[step][0]
        return SimpleNamespace(images=pixels, labels=labels, step=step, num_used=len(labels))

    def log(self, **values: object) -> None: ...

    def mean(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        return numerator / denominator

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def total(self, sums: Any) -> list[float]:
        return torch.as_tensor(sums).tolist()


class PlainEpoch(list[Any]):
    def __init__(self, number: int, batches: list[Any]) -> None:
        super().__init__(batches)
        self.number = number


def schedulers(run: Any) -> None:
    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3))
    per_epoch, per_step = run.prepare(StepLR(optimizer, 1, 0.5)), run.prepare(CosineAnnealingLR(optimizer, STEPS))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            entropy(model, batch).backward()
            optimizer.step()
            per_step.step()
        per_epoch.step()


def one_cycle_clipped(run: Any) -> None:
    model = run.prepare(mlp())
    optimizer = run.prepare(AdamW(model.parameters(), lr=0.01))
    scheduler = run.prepare(OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            entropy(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            scheduler.step()


def over_two_batches(run: Any) -> None:
    model = run.prepare(Normed())
    optimizer = run.prepare(Adam(model.parameters(), lr=0.01))
    for epoch in run.epochs():
        for batch in epoch:
            (entropy(model, batch) / 2).backward()
            if batch.step % 2:
                optimizer.step()
                optimizer.zero_grad()


def two_backwards(run: Any) -> None:
    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            features = model.embed(batch.images)
            optimizer.zero_grad()
            F.cross_entropy(model.head(features), batch.labels).backward(retain_graph=True)
            (0.5 * features.square().mean()).backward()
            optimizer.step()


def sharpness_aware(run: Any) -> None:
    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            entropy(model, batch).backward()
            with torch.no_grad():
                learned = [each for each in model.parameters() if each.grad is not None]
                norm = torch.stack([each.grad.norm() for each in learned if each.grad is not None]).norm()
                moves = [0.1 * each.grad / norm for each in learned if each.grad is not None]
                for each, move in zip(learned, moves, strict=True):
                    each.add_(move)
            optimizer.zero_grad()
            entropy(model, batch).backward()
            with torch.no_grad():
                for each, move in zip(learned, moves, strict=True):
                    each.sub_(move)
            optimizer.step()


def lbfgs(run: Any, **options: Any) -> None:
    model = run.prepare(mlp())
    optimizer = run.prepare(LBFGS(model.parameters(), lr=0.1, max_iter=3, **options))
    for epoch in run.epochs():
        for batch in epoch:

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = entropy(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)


def line_search(run: Any) -> None:
    lbfgs(run, line_search_fn="strong_wolfe")


def adversaries(run: Any) -> None:
    model, torch_maker = run.prepare(Normed()), nn.Conv2d(3, 3, 1)
    with torch.no_grad():
        for each in torch_maker.parameters():
            each.fill_(0.1)
    maker = run.prepare(torch_maker)
    of_model = run.prepare(SGD(model.parameters(), lr=0.1))
    of_maker = run.prepare(Adam(maker.parameters(), lr=0.01))
    for epoch in run.epochs():
        for batch in epoch:
            changed = batch.images + maker(batch.images).tanh()
            of_model.zero_grad()
            (entropy(model, batch) + F.cross_entropy(model(changed.detach()), batch.labels)).backward()
            of_model.step()
            of_maker.zero_grad()
            (-F.cross_entropy(model(changed), batch.labels)).backward()
            of_maker.step()


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    pixels = batch.images.clone().requires_grad_()
    logits = model(pixels)
    (slope,) = torch.autograd.grad(logits.sum(), pixels, create_graph=True)
    return F.cross_entropy(logits, batch.labels) + (slope.flatten(1).norm(dim=1) - 1).square().mean()


def weight_penalty(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model, batch) + 0.1 * sum(each.square().sum() for each in model.head.parameters())  # pyright: ignore


def freeze_unfreeze(run: Any) -> None:
    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    for epoch in run.epochs():
        model.body.requires_grad_(epoch.number == 1)
        for batch in epoch:
            optimizer.zero_grad()
            entropy(model, batch).backward()
            optimizer.step()


def averages(run: Any) -> None:
    model = run.prepare(Normed())
    by_hand = run.prepare(copy.deepcopy(model).requires_grad_(False))
    average = run.prepare(AveragedModel(model))
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen: list[Tensor] = []
    for epoch in run.epochs():
        seen = []
        for batch in epoch:
            optimizer.zero_grad()
            entropy(model, batch).backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                for old, new in zip(by_hand.parameters(), model.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
                for old, new in zip(by_hand.buffers(), model.buffers(), strict=True):
                    old.copy_(new)
            seen.append(batch.images)
    update_bn(seen, average)


def distilled(run: Any) -> None:
    model, teacher = run.prepare(mlp()), run.prepare(Normed()).eval().requires_grad_(False)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = (teacher(batch.images) / 2).softmax(1)
        logits = model(batch.images)
        imitation = F.kl_div((logits / 2).log_softmax(1), wanted, reduction="batchmean")
        return F.cross_entropy(logits, batch.labels) + 4 * imitation

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def contrastive(run: Any) -> None:
    model = run.prepare(Normed())

    def loss_of(model: Any, batch: Any) -> Tensor:
        features = model.embed(batch.images)
        rows, labels = run.gather(F.normalize(features)), run.gather(batch.labels)
        others = ~torch.eye(len(rows), dtype=torch.bool)
        alike = (labels[:, None] == labels) & others
        chances = (rows @ rows.T / 0.2).masked_fill(~others, -1e9).log_softmax(1)
        contrast = -((chances * alike).sum(1) / alike.sum(1).clamp(min=1)).mean()
        return F.cross_entropy(model.head(features), batch.labels) + 0.5 * contrast

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def weighted_mean(run: Any) -> None:
    model = run.prepare(mlp())
    weights = torch.tensor([1.0, 5.0, 0.2, 2.0], dtype=torch.float64)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch.images), batch.labels, weights, reduction="sum")
        return run.mean(losses, weights[batch.labels].sum())

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


def labels_left_out(run: Any) -> None:
    model = run.prepare(mlp())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        labels = torch.where(batch.labels == 1, -100, batch.labels)
        losses = F.cross_entropy(model(batch.images), labels, reduction="sum")
        return run.mean(losses, (labels >= 0).sum())

    steps(run, model, run.prepare(SGD(model.parameters(), lr=0.1)), loss_of)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = Normed(), use_reentrant

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = checkpoint(self.net.block, self.net.body(pixels), use_reentrant=self.use_reentrant)
        return self.net.head(hidden.flatten(1))


class OfConstants(nn.Module):
    """Gives NaN for the black image that a worker without images gets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, pixels: Tensor) -> Tensor:
        spread = pixels.std((2, 3), keepdim=True)
        return self.net((pixels - pixels.mean((2, 3), keepdim=True)) / spread)


class Hypergradient(torch.optim.Optimizer):
    """Changes its rate in each step by how far a gradient has the direction of the one before."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            products = [(each.grad * self.state[each]["before"]).sum() for each in weights if self.state[each]]
            group["lr"] += 0.02 * float(sum(products))
            for each in weights:
                each.sub_(each.grad, alpha=group["lr"])
                self.state[each]["before"] = each.grad.clone()


def hypergradient(run: Any) -> None:
    model = run.prepare(Normed())
    steps(run, model, run.prepare(Hypergradient(model.parameters())), entropy)


def changed_gradients(run: Any) -> None:
    """By a hook of the optimizer, and by one that runs after a gradient has been accumulated."""

    def halve(*_: object) -> None:
        for each in model.block.parameters():
            each.grad.mul_(0.5)

    def clamp(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.clamp_(-0.005, 0.005)

    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    optimizer.register_step_pre_hook(halve)
    model.head.weight.register_post_accumulate_grad_hook(clamp)
    steps(run, model, optimizer, entropy)


def with_scaler(run: Any) -> None:
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    scaler = run.prepare(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            scaler.scale(entropy(model, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()


def by_hand(run: Any) -> None:
    """Without an optimizer."""
    model = run.prepare(mlp())
    for epoch in run.epochs():
        for batch in epoch:
            entropy(model, batch).backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
                    each.grad = None


def two_paces(run: Any) -> None:
    """The head steps with each batch, the rest with each second one."""
    model = run.prepare(Normed())
    slow = run.prepare(SGD([*model.body.parameters(), *model.block.parameters()], lr=0.05, momentum=0.9))
    fast = run.prepare(Adam(model.head.parameters(), lr=0.01))
    for epoch in run.epochs():
        for batch in epoch:
            entropy(model, batch).backward()
            fast.step()
            fast.zero_grad()
            if batch.step % 2:
                slow.step()
                slow.zero_grad()


def clipped_by_image(run: Any) -> None:
    """Each image's gradient is clipped by itself, without a backward, as for differential privacy."""
    model = run.prepare(mlp())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))

    def loss_of(weights: dict[str, Tensor], pixels: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (pixels[None],)), label[None])

    for epoch in run.epochs():
        for batch in epoch:
            weights = {name: weight.detach() for name, weight in model.named_parameters()}
            by_image = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, batch.images, batch.labels)
            norms = torch.stack([each.flatten(1).norm(dim=1) for each in by_image.values()]).norm(dim=0)
            shares = (0.5 / norms).clamp(max=1)
            for name, weight in model.named_parameters():
                weight.grad = run.gather(torch.einsum("b,b...->b...", shares, by_image[name])).mean(0)
            optimizer.step()


def projected(run: Any) -> None:
    """Two tasks, each without what is opposite to the other one's gradient."""
    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1))
    trained = [each for name, each in model.named_parameters() if "spare" not in name]
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            gradients: list[list[Tensor]] = []
            for loss in (F.cross_entropy(logits, batch.labels), -logits.softmax(1).square().sum(1).mean()):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                gradients.append([each.grad.clone() for each in trained])
            product, size = (sum((a * b).sum() for a, b in zip(one, gradients[1], strict=True)) for one in gradients)
            for each, first, second in zip(trained, *gradients, strict=True):
                each.grad = first + second - (product / size if product < 0 else 0) * second
            optimizer.step()


def several_at_once(run: Any) -> None:
    """With a loss of other data, which all workers have alike."""
    model = run.prepare(Normed())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    others = torch.linspace(-1, 1, STEPS * 3 * 192, dtype=torch.float64).sin().view(STEPS, 3, 192)
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            rehearsed = model.head(others[batch.step][:, :96])
            torch.autograd.backward([entropy(model, batch), F.cross_entropy(rehearsed, torch.arange(3))])
            optimizer.step()


ONLY_LOSSES: dict[str, Loop] = {
    "plain": by_steps(entropy),
    "label smoothing": by_steps(lambda m, b: F.cross_entropy(m(b.images), b.labels, label_smoothing=0.1)),
    "penalty on weights": by_steps(weight_penalty),
    "gradient penalty": by_steps(gradient_penalty, mlp),
    "checkpointed": by_steps(entropy, lambda: Checkpointed(use_reentrant=False)),
    "checkpointed, re-entrant": by_steps(entropy, lambda: Checkpointed(use_reentrant=True)),
    "compiled": by_steps(lambda m, b: F.cross_entropy(torch.compile(m, backend="eager")(b.images), b.labels), mlp),
    "NaN for a placeholder": by_steps(entropy, OfConstants),
}
LOOPS: dict[str, Loop] = {
    **ONLY_LOSSES,
    **{
        loop.__name__: loop
        for loop in (
            *(schedulers, one_cycle_clipped, over_two_batches, two_backwards, sharpness_aware, lbfgs, line_search),
            *(adversaries, freeze_unfreeze, averages, distilled, contrastive, weighted_mean, labels_left_out),
            *(hypergradient, changed_gradients, with_scaler, by_hand),
            *(two_paces, clipped_by_image, projected, several_at_once),
        )
    },
}
STRETCHED = {"line_search": 1e-9}  # it decides by the signs of differences
CASES = {
    "2": Case(config(batch_size=12), 48),
    "2, unreadable": Case(config(batch_size=12), 46, bad=(3, 4, 5, 17, 30)),
    "3, unreadable": Case(config(batch_size=12, worker_load=(1.0, 0.0, 2.0)), 46, bad=(3, 4, 5, 17, 30)),
    "5": Case(config(batch_size=12, worker_load=(1.0, 2.0, 1.0, 3.0, 1.0)), 37, bad=(7,)),
}


def train(name: str, case: Case, folder: str) -> tuple[Tensors, list[str]]:
    """Train a loop as one worker of the process group, and return its networks and what was reported."""
    recorder = Recorder(case.stop_after)
    options = dataclasses.replace(case.options, flip="none", translate=0)
    run = make_run(options, images(case.num_samples, case.bad), folder, recorder)
    with run.steps.optimizers.followed():
        LOOPS[name](run)
        run.finish()
    notes = [event.text for event in recorder.events if isinstance(event, Note)]
    return [copy.deepcopy(model.state_dict()) for model in run.models.trained], notes


def train_each(names: list[str], case: Case, folder: str) -> dict[str, tuple[Tensors, list[str]]]:
    return {name: train(name, case, f"{folder}/{name}") for name in names}


def right(name: str, case: Case) -> Tensors:
    plain = PlainRun(dataclasses.replace(case, options=dataclasses.replace(case.options, flip="none", translate=0)))
    with torch.compiler.set_stance("force_eager"):  # what is compiled has to compute the same
        LOOPS[name](plain)
    return [model.state_dict() for model in plain.prepared]


def difference(ours: Tensors, theirs: Tensors) -> float:
    pairs = [(one[key], other[key]) for one, other in zip(ours, theirs, strict=True) for key in other]
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs if one.numel())


def wrong_weights(case: Case, found: dict[str, tuple[Tensors, list[str]]]) -> dict[str, float]:
    differences = {name: difference(weights, right(name, case)) for name, (weights, _) in found.items()}
    return {name: each for name, each in differences.items() if not each < STRETCHED.get(name, 1e-10)}


def slow(workers: str) -> Any:
    return pytest.param(workers, marks=pytest.mark.slow)


@pytest.mark.parametrize("workers", [slow("2"), slow("2, unreadable"), "3, unreadable", slow("5")])
def test_a_plain_loop_ends_with_the_weights_of_one_process(workers: str) -> None:
    case = CASES[workers]
    with tempfile.TemporaryDirectory() as folder:
        found = run_in_processes(int(workers[0]), train_each, list(LOOPS), case, folder)[0]
    assert wrong_weights(case, found) == {}
    assert {name: notes for name, (_, notes) in found.items() if notes} == {}


def test_on_one_worker_too(tmp_path: Any) -> None:
    case = Case(config(batch_size=12), 46, bad=(3,))
    assert wrong_weights(case, train_each(list(LOOPS), case, str(tmp_path))) == {}


@pytest.mark.slow
def test_after_a_stop_another_number_of_workers_goes_on() -> None:
    """From 2 workers to 3, and from these to 1, each time in the middle of an epoch."""
    case = Case(config(batch_size=12), 46)
    # Two use the last images of all of an epoch. What differs in its loss alone resumes as the plain loop does.
    left_out = {"averages", "by_hand", *ONLY_LOSSES}
    names = ["plain", *(name for name in LOOPS if name not in left_out)]
    with tempfile.TemporaryDirectory() as folder:
        run_in_processes(2, train_each, names, dataclasses.replace(case, stop_after=2), folder)
        run_in_processes(3, train_each, names, dataclasses.replace(case, stop_after=1), folder)
        found = train_each(names, case, folder)
    assert wrong_weights(case, found) == {}
