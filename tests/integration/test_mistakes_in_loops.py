"""Mistakes in a loop are refused in their first step, and what makes it depend on the number of workers is reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import UsageError
from raytrain.training.batches.batch import Batch
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder
from tests.helpers.own_loops import (
    OPTIONS,
    Loop,
    LossOf,
    cross_entropy,
    fit,
    learn,
    linear,
    prepared,
    to_the_end,
    train_loop,
)

Body = Callable[[Run, nn.Module, Any, Batch], None]
"""What a loop does with each batch."""


def loop_of(body: Body) -> Loop:
    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs():
            for batch in epoch:
                body(run, model, optimizer, batch)

    return loop


def prepares_a_script(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    script: Any = torch.jit.trace(copy.deepcopy(model).eval(), batch.images)
    run.prepare(script)


def prepares_a_dictionary(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.prepare({"best": 0.0})  # pyright: ignore


def prepares_two_at_once(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.prepare((model, optimizer))  # pyright: ignore


def prepares_a_class(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.prepare(nn.Linear)  # pyright: ignore


def steps_what_is_not_prepared(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    cross_entropy(model, batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def trains_a_loose_parameter(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    own = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [own]})
    (cross_entropy(model, batch) + own.sum()).backward()
    optimizer.step()


def scheduler_that_is_not_prepared(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    cross_entropy(model, batch).backward()
    optimizer.step()


def logs_a_matrix(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(logits=model(batch.images))


def logs_a_number_for_each_pixel(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(pixels=batch.images.flatten())


def logs_a_text(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(phase="warm-up")


def logs_three(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(recall=(1.0, 2.0, 3.0))


def logs_an_epoch(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(loss=1.0, epoch=batch.epoch)


def logs_a_second_rate(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(second_learning_rate=0.1)


def one_logit(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(accuracy=run.accuracy(model(batch.images)[:, :1], batch))


def a_tuple_of_logits(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.log(accuracy=run.accuracy((model(batch.images),), batch))  # pyright: ignore[reportArgumentType]


def sums_over_processes(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    dist.all_reduce(model(batch.images).detach().mean(0))


def gathers_a_number(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    run.gather(cross_entropy(model, batch))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (gathers_a_number, r"run.gather got a single number, and takes rows; give it number\[None\], or let run.total"),
        (prepares_a_script, "got a network of torch.jit"),
        (prepares_a_dictionary, r"run.prepare got a dict; give it one thing with state_dict and load_state_dict"),
        (prepares_two_at_once, r"run.prepare got a tuple; give it one thing"),
        (prepares_a_class, r"run.prepare got the class Linear; give it one thing"),
        (steps_what_is_not_prepared, r"steps a SGD that no checkpoint would hold.*give it to run.prepare"),
        (trains_a_loose_parameter, r"trains a parameter of the shape \(3,\) that is in no prepared network"),
        (scheduler_that_is_not_prepared, "has a scheduler that no checkpoint would hold"),
        (logs_a_matrix, r"run.log\(logits=...\) got a Tensor of the shape \(7, 4\); give one number, the mean over"),
        (logs_a_number_for_each_pixel, r"got a Tensor of the shape \(1344,\); .* a vector of at most 200 numbers"),
        (logs_a_text, r"run.log\(phase=...\) got a str; give one number"),
        (logs_three, r"run.log\(recall=...\) got a tuple of 3; give \(numerator, denominator\), two numbers"),
        (logs_an_epoch, r"run.log\(epoch=...\) would replace what the metrics history has as epoch already; give it"),
        (logs_a_second_rate, r"run.log\(second_learning_rate=...\) would replace what the metrics history has"),
        (
            sums_over_processes,
            r"calls torch.distributed \(.*all_reduce.*one worker has no process group: use run.gather",
        ),
        (a_tuple_of_logits, "run.accuracy got a tuple from the network; give it the logits, a tensor with one row"),
        (one_logit, r"run.accuracy got logits of the shape \(7, 1\) for 7 images and 4 classes"),
    ],
)
def test_a_mistake_in_a_loop_is_refused_in_the_first_step(body: Body, sentence: str, tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(UsageError, match=sentence):
        train_loop(loop_of(body), tmp_path, recorder=recorder)
    assert recorder.rows == [] and not list(tmp_path.rglob("*.pt"))


def called_before_it_is_prepared(run: Run) -> None:
    nn.Sequential(nn.SyncBatchNorm(3), nn.Flatten())(torch.zeros(2, 3, 8, 8))


def test_a_network_that_computes_with_torchs_joined_batch_norm_on_cpus_is_refused(tmp_path: Path) -> None:
    for sentence in run_in_processes(2, error_of, str(tmp_path), called_before_it_is_prepared):
        assert "SyncBatchNorm, which needs a GPU, computes before run.prepare has it (" in sentence
        assert "give it BatchNorm layers" in sentence


def logs_before_a_batch(run: Run) -> None:
    run.log(loss=1.0)


def takes_a_mean_before_a_batch(run: Run) -> None:
    run.mean(torch.ones(()), 1.0)


def in_epochs(use: Callable[[Any], object]) -> Loop:
    """A loop that does something else with each epoch than going over it."""

    def loop(run: Run) -> None:
        prepared(run)
        for epoch in run.epochs():
            use(epoch)

    return loop


def in_batches(use: Callable[[Any], object]) -> Loop:
    return in_epochs(lambda epoch: [use(batch) for batch in epoch])


def goes_over_the_run(run: Any) -> None:
    prepared(run)
    for _ in run:
        pass


def goes_over_the_method(run: Any) -> None:
    prepared(run)
    for _ in run.epochs:
        pass


def goes_over_its_batches(run: Any) -> None:
    for _ in run.batches():
        pass


def takes_a_loader(run: Any) -> None:
    for _ in run.train_loader:
        pass


def with_indices(run: Run) -> None:
    prepared(run)
    for epoch in run.epochs():
        for number, (_images, _labels, _indices) in enumerate(epoch):
            print(number)


LOOP_OVER_BATCHES = r"\(test_mistakes_in_loops.py, line \d+: `.*\); write `for epoch in run.epochs"
EPOCH_HAS = r"\(test_mistakes_in_loops.py, line \d+: `.*\); an epoch has epoch.number, .* and len\(epoch\)"


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (in_epochs(lambda epoch: epoch.images), f"takes an epoch for a batch {LOOP_OVER_BATCHES}"),
        (in_epochs(lambda epoch: epoch.microbatches()), f"takes an epoch for a batch {LOOP_OVER_BATCHES}"),
        (in_epochs(lambda epoch: len(epoch.dataset)), f"takes epoch.dataset {EPOCH_HAS}"),
        (in_epochs(lambda epoch: epoch % 10), f"takes an epoch for a number or a list {EPOCH_HAS}"),
        (in_epochs(lambda epoch: f"{epoch:3d}"), f"takes an epoch for a number or a list {EPOCH_HAS}"),
        (in_epochs(lambda epoch: "%d" % epoch), f"takes an epoch for a number or a list {EPOCH_HAS}"),  # noqa: UP031
        (in_epochs(lambda epoch: epoch[0]), f"takes an epoch for a number or a list {EPOCH_HAS}"),
        (in_batches(lambda batch: batch["labels"]), r"takes batch\['labels'\]; a batch has attributes, .* labels,"),
        (in_batches(lambda batch: batch.image), r"takes batch.image \(.*\); a batch has images, labels,"),
        (with_indices, "takes 3 things from a batch, .*: batch.samples are the indices"),
        (goes_over_the_run, f"goes over the run, .* {LOOP_OVER_BATCHES}"),
        (
            takes_a_loader,
            r"takes run.train_loader \(.*\), which a run does not have; .* write `for epoch in run.epochs",
        ),
        (goes_over_its_batches, f"goes over the run, .* {LOOP_OVER_BATCHES}"),
        (goes_over_the_method, f"goes over the run, .* {LOOP_OVER_BATCHES}"),
    ],
)
def test_what_is_no_loader_nor_a_batch_of_one_is_explained(loop: Loop, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        train_loop(loop, tmp_path)


@pytest.mark.parametrize(
    ("loop", "call"), [(logs_before_a_batch, "run.log"), (takes_a_mean_before_a_batch, "run.mean")]
)
def test_what_needs_a_batch_is_refused_before_the_first_one(loop: Loop, call: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"calls {call} before it has a batch; call it in"):
        train_loop(loop, tmp_path)


def differentiates_twice(run: Run, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    cross_entropy(model, batch).backward(create_graph=True)


def puts_a_layer_in(run: Run, model: Any, optimizer: Any, batch: Batch) -> None:
    layer = nn.Linear(4, run.num_classes).double()
    model.append(layer)
    optimizer.add_param_group({"params": layer.parameters()})
    cross_entropy(model, batch).backward()
    optimizer.step()


def linear_loop_of(body: Body) -> Loop:
    def loop(run: Run) -> None:
        model = run.prepare(linear(run))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs():
            for batch in epoch:
                body(run, model, optimizer, batch)

    return loop


def error_of(folder: str, loop: Loop) -> str:
    try:
        train_loop(loop, folder)
    except UsageError as error:
        return str(error)
    return "nothing"


def errors_of(folder: str) -> list[str]:
    bodies = (differentiates_twice, puts_a_layer_in)
    return [error_of(f"{folder}/{body.__name__}", linear_loop_of(body)) for body in bodies]


def test_gradients_that_cannot_be_those_of_all_workers_are_refused(tmp_path: Path) -> None:
    for twice, layer in run_in_processes(2, errors_of, str(tmp_path)):
        assert twice.startswith("The loop calls loss.backward(create_graph=True), whose gradients are summed over the")
        assert layer.startswith("The loop put a layer with a parameter of the shape (4, 4) into a network after it got")


def wraps_a_prepared_network(run: Run) -> None:
    model = run.prepare(run.build_model())
    fit_called(run, model, nn.parallel.DistributedDataParallel(model))


def prepares_a_wrapper(run: Run) -> None:
    model = run.prepare(nn.parallel.DistributedDataParallel(run.build_model()))
    fit_called(run, model, model)


def wraps_a_layer(run: Run) -> None:
    model: Any = run.prepare(run.build_model())
    model[0] = nn.parallel.DistributedDataParallel(model[0])
    fit_called(run, model, model)


def wraps_before(run: Run) -> None:
    model = run.build_model()
    wrapper = nn.DataParallel(model)
    fit_called(run, run.prepare(model), wrapper)


def fit_called(run: Run, model: nn.Module, called: nn.Module) -> None:
    optimizer = run.prepare(run.build_optimizer(model))
    fit(run, called, optimizer)


WRAPS = (wraps_a_prepared_network, prepares_a_wrapper, wraps_a_layer, wraps_before)


def refusals(folder: str) -> list[str]:
    return [error_of(f"{folder}/{loop.__name__}", loop) for loop in WRAPS]


def test_what_joins_gradients_itself_is_refused_around_a_network_or_in_it(tmp_path: Path) -> None:
    for told in run_in_processes(2, refusals, str(tmp_path)):
        wrappers = ("DistributedDataParallel",) * 3 + ("DataParallel",)
        for text, wrapper in zip(told, wrappers, strict=True):
            assert text.startswith(
                f"The loop puts a network of run.prepare or raytrain.parallel, or a layer of one, into a {wrapper},"
            )


def weight_of(model: nn.Module) -> Tensor:
    return next(model.parameters())


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, batch) + 0.1 * weight_of(model).square().sum()


def anchored(model: nn.Module, batch: Batch) -> Tensor:
    weight = weight_of(model)
    return cross_entropy(model, batch) + (weight - torch.ones_like(weight)).square().sum()


def mean_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels, reduction="sum") / len(batch.labels)


def image_by_image(model: nn.Module, batch: Batch) -> Tensor:
    pairs = zip(batch.images, batch.labels, strict=True)
    return torch.stack([F.cross_entropy(model(image[None]), label[None]) for image, label in pairs]).mean()


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels, reduction="sum")


def summed_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels, reduction="none").sum()


def summed_over_the_global_batch(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels, reduction="sum") / OPTIONS.batch_size


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels, torch.ones(4, dtype=torch.float64))


def some_left_out(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), torch.where(batch.labels == 0, -100, batch.labels))


def told_apart(model: nn.Module, batch: Batch) -> Tensor:
    features = model(batch.images)
    return (features[:, None] - features[None]).square().mean()


def contrasted(model: nn.Module, batch: Batch) -> Tensor:
    features = F.normalize(model(batch.images))
    return F.cross_entropy(features @ features.T, torch.arange(len(features)))


SUM, OTHER_MEAN = "the loss is a sum over images", "the loss is a mean over something else than images"
COMPARES = "the loss compares the images of a worker with each other"
REPORTED: dict[LossOf, list[str]] = {
    cross_entropy: [],
    penalised: [],
    anchored: [],
    mean_by_hand: [],
    image_by_image: [],
    summed: [SUM],
    summed_by_hand: [SUM],
    summed_over_the_global_batch: [SUM],
    weighted: [OTHER_MEAN],
    some_left_out: [OTHER_MEAN],
    told_apart: [COMPARES],
    contrasted: [COMPARES],
}


def notes_of(folder: str) -> list[list[str]]:
    """The notes of a run with each loss, without those of options that the loop leaves unused."""

    def notes_with(loss_of: LossOf) -> list[str]:
        def loop(run: Run) -> None:
            model = run.prepare(linear(run))
            fit(run, model, run.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), loss_of)

        notes = train_loop(loop, f"{folder}/{loss_of.__name__}").notes
        return [note for note in notes if not note.startswith("--")]

    return [notes_with(loss_of) for loss_of in REPORTED]


def test_what_depends_on_the_number_of_workers_is_reported_once_by_worker_0(tmp_path: Path) -> None:
    first, other = run_in_processes(2, notes_of, str(tmp_path / "two"))
    for (loss_of, beginnings), notes in zip(REPORTED.items(), first, strict=True):
        cut = [note[: len(beginning)] for note, beginning in zip(notes, beginnings, strict=False)]
        assert (cut, len(notes)) == (beginnings, len(beginnings)), loss_of.__name__
    assert list(chain(*other)) == []


def test_on_one_worker_no_loss_is_reported(tmp_path: Path) -> None:
    assert list(chain(*notes_of(str(tmp_path)))) == []


def takes_all_batches_first(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in list(epoch):
            learn(model, optimizer, batch)


def gets_each_batch_ahead(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        batches = iter(epoch)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            learn(model, optimizer, batch)
            batch = following


def steps_what_is_left_after_the_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            cross_entropy(model, batch).backward()
            if batch.step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def forgets_its_optimizer(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            cross_entropy(model, batch).backward()


def begins_with_the_gradient_of_an_epoch(run: Run) -> None:
    """As SVRG: its first epoch changes no weight that learns."""
    model, optimizer = prepared(run)
    whole = run.prepare(copy.deepcopy(model).requires_grad_(False))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            if epoch.number:
                optimizer.step()
            else:
                for kept, weight in zip(whole.parameters(), model.parameters(), strict=True):
                    assert weight.grad is not None
                    kept += weight.grad


def measures_statistics_in_each_second_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            if epoch.number % 2:
                model(batch.images)
            else:
                learn(model, optimizer, batch)


def returns_a_number(run: Run) -> float:
    to_the_end(run)
    return 0.5


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (takes_all_batches_first, "after 6 steps the weights are what they were before"),
        (gets_each_batch_ahead, "the loop computes with a batch after it has asked for the next one"),
        (forgets_its_optimizer, "after 6 steps the weights are what they were before"),
        (returns_a_number, "what the loop returns (float) is dropped"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_loop_that_learns_nothing_or_returns_something_is_told_so(loop: Loop, said: str, tmp_path: Path) -> None:
    notes = [note for note in train_loop(loop, tmp_path).notes if not note.startswith("--")]
    assert len(notes) == 1 and notes[0].startswith(said)
    for right in (to_the_end, steps_what_is_left_after_the_epoch):
        notes = train_loop(right, tmp_path / right.__name__).notes
        assert not [note for note in notes if not note.startswith("--")]


def test_an_epoch_without_a_step_of_an_optimizer_is_not_reported(tmp_path: Path) -> None:
    notes = train_loop(begins_with_the_gradient_of_an_epoch, tmp_path / "svrg").notes
    train_loop(measures_statistics_in_each_second_epoch, tmp_path / "statistics", recorder=Recorder(6))
    notes += train_loop(measures_statistics_in_each_second_epoch, tmp_path / "statistics").notes
    assert not [note for note in notes if not note.startswith("--")]


def test_a_stopped_loop_that_gets_each_batch_ahead_is_told_what_it_loses(tmp_path: Path) -> None:
    stopped = train_loop(gets_each_batch_ahead, tmp_path, recorder=Recorder(2))
    assert stopped.outcome.status == "stopped"
    assert any("so a resume leaves it out" in note for note in stopped.notes)


def goes_over_an_epoch_twice(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
        for batch in epoch:
            learn(model, optimizer, batch)


def test_a_second_pass_over_an_epoch_is_refused_unless_the_run_has_stopped(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="goes over epoch 1 a second time"):
        train_loop(goes_over_an_epoch_twice, tmp_path)
    stopped = train_loop(goes_over_an_epoch_twice, tmp_path / "stopped", recorder=Recorder(2)).outcome
    assert stopped.status == "stopped"
