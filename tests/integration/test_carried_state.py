"""A run reports what its loop carries from epoch to epoch in its own variables, as a resume begins that again."""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.training.loop_checks.carried_state import CarriedState
from raytrain.training.run import Run
from tests.helpers.memory_runs import config
from tests.helpers.own_loops import cross_entropy, learn, prepared, train_loop

OPTIONS = config(batch_size=12, epochs=3)


def names_in_notes(loop: Callable[[Run], None], folder: Path) -> list[str]:
    """Return the names that the notes about carried state list."""
    notes = train_loop(loop, folder, OPTIONS).notes
    named = [note.partition("carries ")[2].partition(" from")[0] for note in notes if "carries" in note]
    return [name for names in named for name in names.replace(" and ", ", ").split(", ")]


def best_by_hand(run: Run) -> None:
    """The best accuracy, patience, a counter of steps and a history for a figure."""
    model, optimizer = prepared(run)
    best, wait, global_step, history = float("inf"), 0, 0, []
    for epoch in run.epochs():
        total = num = 0
        for batch in epoch:
            loss = cross_entropy(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
            total, num = total + loss.item() * len(batch.labels), num + len(batch.labels)
        mean = total / num
        history.append((global_step, mean))
        if mean < best:
            best, wait = mean, 0
        else:
            wait += 1
            if wait > 5:
                return


def best_after_a_long_body(run: Run) -> None:
    """As the training script of torch's ImageNet example: the code of a batch is so long that jumps need two bytes."""
    model, optimizer = prepared(run)
    best = 0.0
    for epoch in run.epochs():
        top1 = Meter()
        for i, batch in enumerate(epoch):
            logits = model(batch.images)
            loss = F.cross_entropy(logits, batch.labels)
            right = logits.argmax(1) == batch.labels
            top1.update(right.double().mean().item(), len(batch.labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            largest, smallest = logits.detach().max().item(), logits.detach().min().item()
            middle, spread = logits.detach().mean().item(), logits.detach().std().item()
            run.log(loss=loss, largest=largest, smallest=smallest, middle=middle, spread=spread)
            run.log(right=right.double().mean(), chance=logits.detach().softmax(1).amax(1).mean())
            run.log(norm=nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]))
            if i % 10 == 0:
                print(f"{epoch.number} {i}/{len(epoch)} loss {loss.item():.3f} accuracy {top1.mean:.3f}")
        best = max(best, top1.mean)


def in_a_function_within(run: Run) -> None:
    """A function within the loop's has the code of an epoch."""
    model, optimizer = prepared(run)
    num_seen, average, total = 0, None, 0.0

    def train_one_epoch(epoch: Any) -> None:
        nonlocal num_seen, average, total
        for batch in epoch:
            learn(model, optimizer, batch)
            num_seen += len(batch.labels)
            total += 1
            loss = cross_entropy(model, batch).item()
            average = loss if average is None else 0.9 * average + 0.1 * loss

    for epoch in run.epochs():
        total = 0.0
        train_one_epoch(epoch)


def queue(run: Run) -> None:
    """Features of earlier steps, as MoCo keeps them."""
    model, optimizer = prepared(run)
    keys = torch.linspace(-1, 1, 160, dtype=torch.float64).view(40, 4)
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            loss = F.cross_entropy(logits, batch.labels) + (logits @ keys.T).logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keys = torch.cat([run.gather(logits.detach()), keys])[:40]


class Targets(nn.Module):
    """As early-learning regularisation: a target of each training image."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = torch.zeros(36, 4, dtype=torch.float64)

    def forward(self, logits: Tensor, samples: Tensor) -> Tensor:
        self.chances = logits.softmax(1)  # what it has computed last is nothing that it carries on
        self.targets[samples] = 0.7 * self.targets[samples] + 0.3 * logits.detach().softmax(1)
        return (1 - (self.targets[samples] * logits.softmax(1)).sum(1)).log().mean()


def targets_of_images(run: Run) -> None:
    model, optimizer = prepared(run)
    criterion = Targets()
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch, lambda m, b: cross_entropy(m, b) + criterion(m(b.images), b.samples))


class Shadow:
    """A moving average in a dictionary, as notebooks have it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.num_updates = model, 0
        self.shadow = {name: weight.data.clone() for name, weight in model.named_parameters()}

    def update(self) -> None:
        self.num_updates += 1
        for name, weight in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * weight.data


class Wrapper:
    """Keeps the state of a scaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


def scaled(run: Run) -> None:
    """A scaler of the loss, which is not prepared, and one that is."""
    model, optimizer = prepared(run)
    scaler, kept, part = (torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) for _ in range(3))
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    run.prepare(kept)
    run.prepare(Wrapper(part))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            part.scale(kept.scale(disabled.scale(torch.zeros(()))))
            scaler.scale(cross_entropy(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            kept.update(scaler.get_scale())
            part.update(scaler.get_scale())


class Trainer:
    """A loop in an object, whose epochs are a method."""

    def __init__(self, run: Run) -> None:
        self.run, self.epoch, self.loss, self.wait = run, -1, 0.0, 0
        self.model, self.optimizer = prepared(run)
        self.ema = Shadow(self.model)

    def train_epoch(self, epoch: Any) -> None:
        for batch in epoch:
            learn(self.model, self.optimizer, batch)
            self.ema.update()

    def fit(self) -> None:
        for epoch in self.run.epochs():
            self.epoch = epoch.number
            self.train_epoch(epoch)
            self.loss = float(self.epoch)
            self.report()
            self.wait += 1

    def report(self) -> str:
        return f"{self.epoch}: {self.loss}"


def trainer(run: Run) -> None:
    Trainer(run).fit()


class Lowest:
    """A class of the script: in a worker, whose program is raytrain's, its module ``__main__`` is another one."""

    def __init__(self) -> None:
        self.least = float("inf")

    def update(self, loss: float) -> None:
        self.least = min(self.least, loss)


Lowest.__module__ = "__main__"


def best_by_a_class_of_the_script(run: Run) -> None:
    model, optimizer = prepared(run)
    lowest = Lowest()
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            lowest.update(cross_entropy(model, batch).item())


def through_a_bar(run: Run) -> None:
    """A generator of the user's own hands on the batches, as a progress bar does."""
    model, optimizer = prepared(run)
    num_seen = 0
    for epoch in run.epochs():
        for batch in _with_bar(epoch):
            learn(model, optimizer, batch)
            num_seen += len(batch.labels)
            run.log(seen=float(num_seen))


def _with_bar(epoch: Any) -> Any:
    for batch in epoch:  # noqa: UP028 - as in a library
        yield batch


def generators(run: Run) -> None:
    """Generators that live over the batches, and a window of losses."""
    model, optimizer = prepared(run)
    rng, drawn, window = np.random.default_rng(0), random.Random(0), deque(maxlen=3)
    for epoch in run.epochs():
        for batch in epoch:
            factor = rng.uniform(0.9, 1.1) * drawn.uniform(0.9, 1.1)
            learn(model, optimizer, batch, lambda m, b, factor=factor: cross_entropy(m, b) * factor)
            window.append(factor)


ema: float | None = None
past_losses: list[float] = []


def in_global_variables(run: Run) -> None:
    model, optimizer = prepared(run)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        global ema
        loss = cross_entropy(model, batch)
        past_losses.append(loss.item())
        ema = past_losses[-1] if ema is None else 0.9 * ema + 0.1 * past_losses[-1]
        return loss * (1.0 if loss.item() < 2 * ema else 0.5)

    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch, loss_of)


def things_of_rare_kinds(run: Run) -> None:
    """Values whose contents torch or NumPy cannot all add up, beside one that is carried."""
    model, optimizer = prepared(run)
    swapped, small = np.zeros(3, dtype=">f4"), torch.zeros(3).to(torch.float8_e4m3fn)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch, cross_entropy)
        swapped = swapped + 1
        small = small.clone()


CARRIED: dict[Callable[[Run], None], set[str]] = {
    best_after_a_long_body: {"best"},
    in_a_function_within: {"num_seen", "average"},
    best_by_hand: {"best", "global_step", "history"},
    queue: {"keys"},
    targets_of_images: {"criterion.targets"},
    scaled: {"scaler"},
    trainer: {"self.ema.shadow", "self.ema.num_updates", "self.wait"},
    best_by_a_class_of_the_script: {"lowest.least"},
    through_a_bar: {"num_seen"},
    generators: {"rng", "drawn", "window"},
    in_global_variables: {"ema", "past_losses"},
    things_of_rare_kinds: {"swapped"},
}


@pytest.mark.parametrize("loop", CARRIED)
def test_what_a_loop_carries_from_epoch_to_epoch_is_named_once(loop: Callable[[Run], None], tmp_path: Path) -> None:
    names = names_in_notes(loop, tmp_path)
    assert set(names) >= CARRIED[loop]
    assert len(names) == len(set(names))
    assert set(names) <= CARRIED[loop] | {"wait"}


class Kept(Targets):
    """The same in a buffer, with a number that it computes anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        targets = self.targets
        del self.targets
        self.register_buffer("targets", targets)


class Meter:
    """The mean of an epoch, as the example of ImageNet has it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = self.sum = self.mean = 0.0
        self.count = 0

    def update(self, value: float, number: int) -> None:
        self.value = value
        self.sum += value * number
        self.count += number
        self.mean = self.sum / self.count


class Events:
    """Has no functions for any event; reading one adds an empty list of them. Counts them for a line on the screen."""

    def __init__(self) -> None:
        self.handlers: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.num_fired = 0

    def log(self, line: str) -> None:
        print(line)

    def fire(self, name: str) -> None:
        self.num_fired += 1
        self.log(f"event {self.num_fired}")
        for handler in self.handlers[name]:
            handler()


def sane(run: Run) -> None:
    """What begins again in each epoch, is computed from its number, is prepared, is a time, is printed or is empty."""
    events = Events()
    events.fire("start")
    model, optimizer = prepared(run)
    scheduler = run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    criterion = run.prepare(Kept())
    last_time, meter, results = time.perf_counter(), Meter(), {"loss": 0.0}
    confusion, limit = torch.zeros(4, 4), float("nan")
    global_step = 0
    for epoch in run.epochs():
        meter.reset()
        confusion.zero_()
        temperature = 1.0 - 0.1 * epoch.number
        losses: list[float] = []
        for number, batch in enumerate(epoch):
            loss = cross_entropy(model, batch) / temperature + criterion(model(batch.images), batch.samples)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(batch.labels))
            losses.append(loss.item())
            if loss.item() > limit:  # never: no number is larger than NaN
                limit = loss.item()
            confusion[batch.labels, batch.labels] += 1
            if number % 2 == 0:
                print(number, meter.mean, meter.value)
            global_step += 1
            if global_step % 2 == 0:
                shown = 100 * meter.mean
                print(f"step {global_step / len(epoch):.1f} {shown}")
        scheduler.step()
        events.fire(f"epoch {epoch.number}")
        results["loss"] = sum(losses)
        took = time.perf_counter() - last_time
        last_time = time.perf_counter()
        print(f"epoch {epoch.number} {took:.1f} {results} {loss.item()} {confusion}")


def test_what_a_resume_computes_again_is_not_named(tmp_path: Path) -> None:
    assert names_in_notes(sane, tmp_path) == []


class Strange:
    """An object at which the search itself fails."""

    def __init__(self) -> None:
        vars(self).update({7: []})  # pyright: ignore[reportCallIssue, reportArgumentType]


def with_a_strange_object(run: Run) -> None:
    model, optimizer = prepared(run)
    thing = Strange()
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch, cross_entropy)
        print(thing)


def test_a_loop_with_an_object_that_cannot_be_searched_trains(tmp_path: Path) -> None:
    assert names_in_notes(with_a_strange_object, tmp_path) == []


def test_large_arrays_are_compared_without_a_copy() -> None:
    images, targets, labels = np.zeros((8000, 32, 32, 3), np.uint8), torch.zeros(2000, 1000), np.zeros(2_000_000, int)
    carried = CarriedState(lambda thing: False, set)
    names: list[str] = []
    tracemalloc.start()
    try:
        for number in range(2):
            carried.begin_epoch(sys._getframe())  # pyright: ignore[reportPrivateUsage]
            names += carried.changed(sys._getframe(), None)  # pyright: ignore[reportPrivateUsage]
            images[number] += 1
            targets[number] += labels[number] + 1
        assert tracemalloc.get_traced_memory()[1] < images.nbytes  # in float64 they are eight times as large
    finally:
        tracemalloc.stop()
    assert {"images", "targets"} <= set(names) and "labels" not in names


def accumulated(run: Run) -> None:
    """Adds up gradients of two batches, and steps after the last batch of an epoch, too."""
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for i, batch in enumerate(epoch):
            is_last = i + 1 == len(epoch)
            (cross_entropy(model, batch) / 2).backward()
            if i % 2 == 1 or is_last:
                optimizer.step()
                optimizer.zero_grad()


def rate_within_an_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    scheduler: Any = run.prepare(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1))
    for epoch in run.epochs():
        for number, batch in enumerate(epoch):
            learn(model, optimizer, batch)
            scheduler.step(epoch.number + number / len(epoch))


def _logged_every(epoch: Any, header: str) -> Any:
    for batch in epoch:
        yield batch
        print(header)


def _adjust_learning_rate(optimizer: torch.optim.Optimizer, progress: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (1 - progress / 4)


def rate_by_a_function(run: Run) -> None:
    """As the training scripts of MAE and MoCo: a generator hands on the batches, and a function sets the rate."""
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for step, batch in enumerate(_logged_every(epoch, f"epoch {epoch.number}")):
            _adjust_learning_rate(optimizer, epoch.number + step / len(epoch))
            learn(model, optimizer, batch)


def warmed_up_by_hand(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for i, batch in enumerate(epoch):
            number = epoch.number * len(epoch) + i
            if number < 5:
                for group in optimizer.param_groups:
                    group["lr"] = 0.02 * (number + 1)
            learn(model, optimizer, batch)


def rates_by_zip(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch, rate in zip(epoch, np.linspace(0.2, 0.01, len(epoch)), strict=True):
            optimizer.param_groups[0]["lr"] = rate
            learn(model, optimizer, batch)


def ramped_loss(run: Run) -> None:
    """The batches are counted by hand."""
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        number = 0
        for batch in epoch:
            loss = cross_entropy(model, batch)
            loss = loss + min(number / 3, 1) * model(batch.images).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            number += 1  # noqa: SIM113


def numbered_for_people(run: Run) -> None:
    """The number is printed, divides a mean, and is an argument that a function drops."""
    model, optimizer = prepared(run)

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(model, batch)

    for epoch in run.epochs():
        total = 0.0
        for (i, batch), name in zip(enumerate(epoch), "abcdefgh", strict=False):
            loss = training_step(batch, i)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            if i % 2 == 0:
                print(name, i, total / (i + 1), optimizer.param_groups[0]["lr"])


class Learner:
    """Has the number of a batch in an attribute, as fastai's, and trains by others."""

    def fit(self, run: Run) -> None:
        self.model, self.optimizer = prepared(run)
        for epoch in run.epochs():
            for self.iter, self.batch in enumerate(epoch):
                self.optimizer.zero_grad()
                self.loss = cross_entropy(self.model, self.batch)
                self.loss.backward()
                self.optimizer.step()


class Both:
    """Steps an optimizer and its schedule, and has no state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parts = [optimizer]

    def step(self) -> None:
        for part in self.parts:
            part.step()


def step_of_a_wrapper(run: Run) -> None:
    model, optimizer = prepared(run)
    both = Both(optimizer)
    for epoch in run.epochs():
        for i, batch in enumerate(epoch):
            (cross_entropy(model, batch) / 2).backward()
            if i % 2 == 1:
                both.step()
                model.zero_grad()


def profiled(run: Run) -> None:
    """Steps a profiler, which is no part of the training."""
    model, optimizer = prepared(run)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for epoch in run.epochs():
            for i, batch in enumerate(epoch):
                learn(model, optimizer, batch)
                if i % 2 == 0:
                    profiler.step()


def loss_from_a_batch_on(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for i, batch in enumerate(epoch):
            loss = cross_entropy(model, batch)
            if i >= 2:
                loss = 2 * loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 2 == 0:
                loss = loss.item()
                print(loss)


@pytest.mark.parametrize(
    ("loop", "number"),
    [
        *(
            (accumulated, "i"),
            (loss_from_a_batch_on, "i"),
            (rate_within_an_epoch, "number"),
            (step_of_a_wrapper, "i"),
            (sane, None),
        ),
        *((rate_by_a_function, "step"), (warmed_up_by_hand, "i"), (rates_by_zip, "rate"), (ramped_loss, "number")),
        *((profiled, None), (numbered_for_people, None), (Learner().fit, None)),
    ],
)
def test_a_number_of_enumerate_by_which_an_optimizer_steps_is_named(
    loop: Callable[[Run], None], number: str | None, tmp_path: Path
) -> None:
    notes = [note for note in train_loop(loop, tmp_path, OPTIONS).notes if "enumerate" in note]
    assert [note.partition(" how")[0] for note in notes] == ([f"the loop decides by `{number}`"] if number else [])


def rate_of_an_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    for number, epoch in enumerate(run.epochs()):
        _adjust_learning_rate(optimizer, number)
        for batch in epoch:
            learn(model, optimizer, batch)


def rates_of_epochs(run: Run) -> None:
    model, optimizer = prepared(run)
    for rate, epoch in zip([0.1, 0.01], run.epochs(), strict=False):
        optimizer.param_groups[0]["lr"] = rate
        _one_epoch(model, optimizer, epoch)


def _one_epoch(model: nn.Module, optimizer: Any, epoch: Any) -> None:
    for batch in epoch:
        learn(model, optimizer, batch)


def loss_from_an_epoch_on(run: Run) -> None:
    model, optimizer = prepared(run)
    for number, epoch in enumerate(run.epochs()):
        for batch in epoch:
            loss = cross_entropy(model, batch)
            if number > 0:
                loss = loss + model(batch.images).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def two_stages(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in islice(run.epochs(), 1):
        _one_epoch(model, optimizer, epoch)
    for epoch in run.epochs():
        _one_epoch(model, optimizer, epoch)


def epochs_for_people(run: Run) -> None:
    model, optimizer = prepared(run)
    for number, epoch in enumerate(run.epochs()):
        _one_epoch(model, optimizer, epoch)
        print(f"epoch {number} of {epoch.number}")


@pytest.mark.parametrize(
    ("loop", "number"),
    [
        *((rate_of_an_epoch, "number"), (rates_of_epochs, "rate"), (loss_from_an_epoch_on, "number")),
        *((two_stages, "islice(run.epochs(), 1)"), (epochs_for_people, None), (sane, None)),
    ],
)
def test_a_number_of_epochs_by_which_a_loop_decides_is_named(
    loop: Callable[[Run], None], number: str | None, tmp_path: Path
) -> None:
    notes = [note for note in train_loop(loop, tmp_path, OPTIONS).notes if "the epochs of this attempt" in note]
    assert [note.partition(" how")[0] for note in notes] == ([f"the loop decides by `{number}`"] if number else [])
