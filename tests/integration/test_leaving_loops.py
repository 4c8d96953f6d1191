"""Loops that leave an epoch or the run early, stop and resume: which steps count, and what checkpoints hold."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR

from raytrain.errors import LoopFailed, UsageError
from raytrain.monitor.events import CheckpointWritten
from raytrain.runs.outcome import StopReason
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder
from tests.helpers.own_loops import (
    OPTIONS,
    Loop,
    assert_same_weights,
    cross_entropy,
    fit,
    learn,
    linear,
    new_run,
    prepared,
    to_the_end,
    train_loop,
)


def returns_early(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            if batch.step == 4:
                return


def return_early_and_resume(folder: str) -> list[Tensor]:
    returned = train_loop(returns_early, folder).outcome
    assert (returned.status, returned.progress.step) == ("stopped", 5)
    assert returned.stop_reason == StopReason("caller", "the loop returned")
    resumed = train_loop(to_the_end, folder)
    assert (resumed.outcome.status, resumed.outcome.progress.step) == ("finished", 12)
    assert resumed.outcome.stop_reason is None
    if resumed.run.rank == 0:  # which writes them
        assert returned.checkpoint == "checkpoints/step-000000005.pt"
        assert resumed.outcome.checkpoint == "checkpoints/step-000000012.pt"
    return resumed.weights


def train_in_parts_and_whole(folder: str) -> tuple[list[Tensor], list[Tensor]]:
    return return_early_and_resume(f"{folder}/early"), train_loop(to_the_end, f"{folder}/whole").weights


@pytest.mark.parametrize(("loop", "status"), [(to_the_end, "finished"), (returns_early, "stopped")])
def test_a_loop_may_end_with_a_successful_exit(loop: Loop, status: str, tmp_path: Path) -> None:
    def loop_and_exit(run: Run) -> None:
        loop(run)
        sys.exit(0)

    assert train_loop(loop_and_exit, tmp_path).outcome.status == status


def test_a_loop_that_returns_early_on_all_workers_writes_a_checkpoint(tmp_path: Path) -> None:
    ours, theirs = run_in_processes(2, train_in_parts_and_whole, str(tmp_path))[0]
    assert_same_weights("returns early", ours, theirs, 0.0)


def one_returns(folder: str) -> str:
    """Train with a loop that returns early on worker 1; return the error message of this worker."""

    def loop(run: Run) -> None:
        model = run.prepare(linear(run))
        optimizer = run.prepare(run.build_optimizer(model))
        for epoch in run.epochs():
            for batch in epoch:
                learn(model, optimizer, batch)
                if batch.step == 4 and run.rank == 1:
                    return

    try:
        train_loop(loop, folder)
    except UsageError as error:
        return str(error)
    except Exception:
        return "the other worker is gone"
    return "nothing"


@pytest.mark.slow  # the other worker waits a minute for the one that returned
def test_a_loop_that_returns_early_on_some_workers_is_refused(tmp_path: Path) -> None:
    _, error = run_in_processes(2, one_returns, str(tmp_path))
    assert error.startswith("After step 5 the loop returned on 1 of 2 workers")


def returns_in_the_last_batch(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            if batch.step == 11:
                return


def breaks_in_the_last_batch(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            if batch.step % len(epoch) == len(epoch) - 1:
                break


@pytest.mark.parametrize("loop", [returns_in_the_last_batch, breaks_in_the_last_batch])
def test_a_loop_that_leaves_the_batches_after_the_last_step_is_evaluated(loop: Loop, tmp_path: Path) -> None:
    trained = train_loop(loop, tmp_path)
    outcome = trained.outcome
    assert (outcome.status, outcome.stop_reason, outcome.progress.evaluated_step) == ("finished", None, 12)
    assert [row.step for row in trained.rows("evaluation")] == [6, 12]
    assert trained.notes == []  # no batch was left out
    assert_same_weights("last", trained.weights, train_loop(to_the_end, tmp_path / "whole").weights, 0.0)


def breaks_out_of_epochs(run: Run) -> None:
    model, optimizer = prepared(run)
    scheduler = run.prepare(ExponentialLR(optimizer, 0.5))
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            if batch.step % len(epoch) == 3:
                break
        scheduler.step()


def break_out_of_epochs(folder: str) -> tuple[list[Tensor], str, int]:
    trained = train_loop(breaks_out_of_epochs, folder)
    return trained.weights, trained.outcome.status, trained.outcome.progress.step


def test_batches_that_a_loop_leaves_out_are_reported_and_the_rest_counts(tmp_path: Path) -> None:
    trained = train_loop(breaks_out_of_epochs, tmp_path / "one")
    assert trained.notes == [
        f"the loop left epoch {number} after step {step}, so 2 batches of it will not be used for training; "
        "--max-steps ends a run early"
        for number, step in ((1, 4), (2, 10))
    ]
    assert [row.step for row in trained.rows("step")] == [1, 2, 3, 4, 7, 8, 9, 10]
    assert [row.learning_rate for row in trained.rows("step")] == [0.1] * 4 + [0.05] * 4
    assert [row.step for row in trained.rows("evaluation")] == [6, 12]
    assert trained.outcome.progress.samples_seen == 2 * 4 * 7
    for weights, *end in run_in_processes(2, break_out_of_epochs, str(tmp_path / "two")):
        assert end == ["finished", 12]
        assert_same_weights("breaks", weights, trained.weights, 1e-10)


@pytest.mark.parametrize("stop_after", [2, 3, 4, 5])
def test_a_loop_that_breaks_out_of_its_epochs_resumes_where_it_was(stop_after: int, tmp_path: Path) -> None:
    whole = train_loop(breaks_out_of_epochs, tmp_path / "whole")
    stopped = train_loop(breaks_out_of_epochs, tmp_path, recorder=Recorder(stop_after))
    assert stopped.outcome.status == "stopped"
    resumed = train_loop(breaks_out_of_epochs, tmp_path)
    assert (resumed.outcome.status, resumed.outcome.progress.step) == ("finished", 12)
    assert_same_weights("breaks", resumed.weights, whole.weights, 0.0)


def epoch_by_epoch(run: Run) -> None:
    """Asks for the epochs again for each of them, and steps a scheduler after its batches."""
    model, optimizer = prepared(run)
    scheduler = run.prepare(ExponentialLR(optimizer, 0.5))
    for _ in range(run.progress.step // 6, 2):
        epochs = run.epochs()
        for batch in next(epochs, ()):  # none after a stop
            learn(model, optimizer, batch)
        if run.progress.step % 6 == 0:
            scheduler.step()


def with_a_scheduler(run: Run) -> None:
    """The code after the loop over the batches belongs to the end of the epoch."""
    model, optimizer = prepared(run)
    scheduler = run.prepare(ExponentialLR(optimizer, 0.5))
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
        scheduler.step()


@pytest.mark.parametrize("stop_after", [2, 4, 5, 6, 9])
@pytest.mark.parametrize("loop", [with_a_scheduler, epoch_by_epoch])
def test_what_follows_the_batches_of_an_epoch_happens_once_in_a_run_that_stops(
    loop: Loop, stop_after: int, tmp_path: Path
) -> None:
    whole = train_loop(with_a_scheduler, tmp_path / "whole")
    stopped = train_loop(loop, tmp_path, recorder=Recorder(stop_after))
    assert (stopped.outcome.status, stopped.outcome.progress.step) == ("stopped", stop_after + 1)
    resumed = train_loop(loop, tmp_path)
    assert (resumed.outcome.status, resumed.outcome.progress.step) == ("finished", 12)
    rates = [row.learning_rate for row in (*stopped.rows("step"), *resumed.rows("step"))]
    assert rates == [0.1] * 6 + [0.05] * 6
    assert_same_weights("epochs", resumed.weights, whole.weights, 0.0)


def keeps_no_iterator(run: Run) -> None:
    model, optimizer = prepared(run)
    for batch in next(iter(run.epochs())):
        learn(model, optimizer, batch)


@pytest.mark.timeout(60)
def test_the_first_epoch_may_be_taken_alone(tmp_path: Path) -> None:
    trained = train_loop(keeps_no_iterator, tmp_path)
    assert (trained.outcome.status, trained.outcome.progress.step) == ("stopped", 6)


def test_epochs_that_are_asked_for_again_after_the_last_one_are_none(tmp_path: Path) -> None:
    def twice(run: Run) -> None:
        to_the_end(run)
        assert list(run.epochs()) == []

    outcome = train_loop(twice, tmp_path).outcome
    assert (outcome.status, outcome.progress.step) == ("finished", 12)


def test_epochs_know_their_number_and_the_number_of_their_batches(tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs():
            steps: list[int] = []
            for batch in epoch:
                assert batch.epoch == epoch.number
                steps.append(batch.step)
                learn(model, optimizer, batch)
            seen.append((epoch.number, len(epoch), steps))

    seen: list[tuple[int, int, list[int]]] = []
    train_loop(loop, tmp_path, recorder=Recorder(stop_after=7))
    assert seen == [(0, 6, [0, 1, 2, 3, 4, 5]), (1, 6, [6, 7])]
    train_loop(loop, tmp_path)  # the rest of the second epoch
    assert seen[2:] == [(1, 6, [8, 9, 10, 11])]


def test_an_error_of_a_loop_is_told_while_a_thread_of_its_own_is_in_its_epochs(tmp_path: Path) -> None:
    is_evaluating, may_end = Event(), Event()

    def measure() -> dict[str, float]:
        is_evaluating.set()
        may_end.wait(60)
        raise InterruptedError("the test is over")

    def train_until_the_test_is_over(run: Run) -> None:
        with suppress(InterruptedError):
            fit(run, *prepared(run), evaluate=measure)

    def loop(run: Run) -> None:
        Thread(target=train_until_the_test_is_over, args=(run,), name="in epochs").start()
        assert is_evaluating.wait(60)
        raise ZeroDivisionError("of the loop")

    with pytest.raises(LoopFailed, match="ZeroDivisionError: of the loop"):
        train_loop(loop, tmp_path)
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "in epochs":
            thread.join()


def does_nothing(run: Run) -> None:
    run.prepare(run.build_model())


def yields(run: Run) -> Iterator[int]:
    to_the_end(run)
    yield run.progress.step


def lists_its_epochs(run: Run) -> None:
    """Goes through the epochs before their batches, so that it trains nothing."""
    model, optimizer = prepared(run)
    for epoch in list(run.epochs()):
        for batch in epoch:
            cross_entropy(model, batch).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (does_nothing, r"returned without a step; it goes over the batches of run.epochs\(\)"),
        (yields, r"returned without a step; it goes over the batches of run.epochs\(\)"),
        (lists_its_epochs, "the next epoch without a batch of the one before"),
    ],
)
def test_a_loop_without_a_step_is_refused(loop: Loop, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        train_loop(loop, tmp_path)


def accumulates(run: Run) -> None:
    """Steps its optimizer after each four batches."""
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            (cross_entropy(model, batch) / 4).backward()
            if batch.step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def test_a_checkpoint_waits_until_gradients_that_add_up_have_been_used(tmp_path: Path) -> None:
    trained = train_loop(accumulates, tmp_path, dataclasses.replace(OPTIONS, checkpoint_every=("3st",)))
    written = [event for event in trained.recorder.events if isinstance(event, CheckpointWritten)]
    assert [event.step for event in written] == [4, 8, 12]  # due after 3, 6, 9 and 12


@pytest.mark.parametrize(("stop_after", "stops_at"), [(1, 4), (3, 4), (4, 8), (7, 8), (8, 12)])
def test_a_stop_waits_until_gradients_that_add_up_have_been_used(
    stop_after: int, stops_at: int, tmp_path: Path
) -> None:
    whole = train_loop(accumulates, tmp_path / "whole")
    stopped = train_loop(accumulates, tmp_path, recorder=Recorder(stop_after)).outcome
    assert (stopped.status, stopped.progress.step) == ("finished" if stops_at == 12 else "stopped", stops_at)
    resumed = train_loop(accumulates, tmp_path)
    assert resumed.outcome.status == "finished"
    assert_same_weights("accumulates", resumed.weights, whole.weights, 0.0)


def test_every_checkpoint_is_an_event(tmp_path: Path) -> None:
    events = train_loop(to_the_end, tmp_path).recorder.events
    assert events == [CheckpointWritten(f"checkpoints/step-{step:09d}.pt", step) for step in (6, 12)]


def two_models(run: Run) -> None:
    models = [run.prepare(run.build_model()), run.prepare(linear(run))]
    fit(run, models[0], run.prepare(run.build_optimizer(models[0])))


def no_optimizer(run: Run) -> None:
    run.prepare(run.build_model())
    next(iter(run.epochs()))


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (two_models, "The checkpoint holds no model-2"),
        (no_optimizer, "holds optimizer, which this loop does not prepare"),
    ],
)
def test_a_loop_that_prepares_other_objects_than_its_checkpoint_has_is_refused(
    loop: Loop, sentence: str, tmp_path: Path
) -> None:
    train_loop(to_the_end, tmp_path, recorder=Recorder(stop_after=2))
    with pytest.raises(UsageError, match=sentence):
        train_loop(loop, tmp_path)


def test_an_optimizer_has_the_options_of_the_start_that_resumes(tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"]) == (run.config.learning_rate, run.config.weight_decay)
        fit(run, model, optimizer)

    def adam(run: Run) -> None:
        run.prepare(torch.optim.Adam(run.prepare(run.build_model()).parameters()))

    for learning_rate, weight_decay in ((0.1, 0.0), (0.1, 0.5), (0.2, 0.5)):
        options = dataclasses.replace(OPTIONS, learning_rate=learning_rate, weight_decay=weight_decay)
        train_loop(loop, tmp_path, options, Recorder(stop_after=2))
    with pytest.raises(UsageError, match=r"optimizer has the options .*momentum.*prepares Adam"):
        train_loop(adam, tmp_path)


def base_rates_of_groups(run: Run, rate: float = 0.1) -> None:
    """Takes its base rates from the prepared optimizer, and sets those of the first step itself."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5))
    (group,) = optimizer.param_groups
    group["initial_lr"], momentum = group["lr"], group["momentum"]
    group["lr"] *= 0.5
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            group["lr"] = group["initial_lr"] / (2 + batch.step)
            group["momentum"] = momentum + 0.02 * batch.step


def rate_changed_before_the_epochs(run: Run, rate: float = 0.1) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer.param_groups[0]["lr"] = rate
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            optimizer.param_groups[0]["lr"] *= 0.8


def warm_up_then_cosine(run: Run, rate: float = 0.1) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=rate))
    schedules = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 10)]
    scheduler = run.prepare(SequentialLR(optimizer, schedules, [5]))
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            scheduler.step()


class Shadow:
    """A moving average as many scripts have it: its weights are those of the network when they are registered."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.weights = model, dict[str, Tensor]()

    def register(self) -> None:
        for name, weight in self.model.named_parameters():
            self.weights[name] = weight.detach().clone()

    def update(self) -> None:
        for name, weight in self.model.named_parameters():
            self.weights[name].lerp_(weight.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def set_up_after_prepare(run: Run) -> None:
    """Draws weights again, copies them to a teacher, and registers an average, all after run.prepare."""
    student: Any = run.prepare(linear(run))
    teacher: Any = run.prepare(linear(run))
    shadow = run.prepare(Shadow(student))
    optimizer = run.prepare(torch.optim.SGD(student.parameters(), lr=0.1))
    nn.init.constant_(student[1].weight, 0.01)
    teacher.load_state_dict(student.state_dict())
    shadow.register()
    for epoch in run.epochs():
        for batch in epoch:
            learn(student, optimizer, batch)
            shadow.update()
            with torch.no_grad():
                teacher[1].weight.copy_(shadow.weights["1.weight"])


def reparametrised_after_prepare(run: Run) -> None:
    """Its state does not fit into the network as it is prepared."""
    model: Any = run.prepare(linear(run))
    weight_norm(model[1])
    model.append(nn.Linear(run.num_classes, run.num_classes).double())
    fit(run, model, run.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))


OF_RATES: list[Any] = [base_rates_of_groups, rate_changed_before_the_epochs, warm_up_then_cosine]


@pytest.mark.parametrize("stop_after", [2, 5])
@pytest.mark.parametrize("loop", [*OF_RATES, set_up_after_prepare, reparametrised_after_prepare])
def test_what_a_loop_sets_up_between_prepare_and_its_epochs_is_right_on_a_resume(
    loop: Loop, stop_after: int, tmp_path: Path
) -> None:
    whole = train_loop(loop, tmp_path / "whole")
    train_loop(loop, tmp_path, recorder=Recorder(stop_after))
    assert_same_weights("rates", train_loop(loop, tmp_path).weights, whole.weights, 0.0)


@pytest.mark.parametrize("loop", OF_RATES)
def test_a_rate_that_the_user_has_changed_multiplies_those_of_a_schedule(
    loop: Callable[[Run, float], None], tmp_path: Path
) -> None:
    def rates(rate: float, folder: Path, stop_after: int | None = None) -> list[float | None]:
        trained = train_loop(lambda run: loop(run, rate), folder, recorder=Recorder(stop_after))
        return [row.learning_rate for row in trained.rows("step")]

    doubled = rates(0.2, tmp_path / "doubled")
    rates(0.1, tmp_path, stop_after=2)
    assert rates(0.2, tmp_path, stop_after=1) == pytest.approx(doubled[3:5])
    assert rates(0.2, tmp_path) == pytest.approx(doubled[5:])


class Window:
    """Something with a state, which no checkpoint can hold if its losses are a deque."""

    def __init__(self, losses: Any = None) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_state_that_no_checkpoint_can_hold_is_refused_when_it_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"prepares as state .* holds collections.deque, which"):
        new_run(tmp_path).prepare(Window(deque([0.0])))


def test_a_state_that_no_checkpoint_can_hold_later_is_refused_when_the_first_is_written(tmp_path: Path) -> None:
    def with_window(run: Run) -> None:
        run.prepare(Window()).losses = deque([0.0])
        to_the_end(run)

    with pytest.raises(UsageError, match=r"prepares as state .* holds collections.deque, which"):
        train_loop(with_window, tmp_path)
