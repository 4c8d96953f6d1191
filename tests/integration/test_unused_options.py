"""A run reports which of its options a loop leaves unused, and whether it draws numbers of each worker's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from raytrain.config import ResolvedConfig
from raytrain.errors import UsageError
from raytrain.monitor.events import Note
from raytrain.runs.records import read_unused_options
from raytrain.storage.open import open_store
from raytrain.training.assembly import train_run
from raytrain.training.evaluation import evaluate as evaluate_network
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, make_spec
from tests.helpers.own_loops import fit, learn

NUM_IMAGES = 24
GIVEN: dict[str, Any] = {
    "weight_decay": 0.1,
    "label_smoothing": 0.1,
    "optimizer": "adamw",
    "accumulate": 2,
    "mixup": 0.2,
    "schedule": "cosine",
    "ema_decay": 0.9,
    "clip_norm": 1.0,
}


def notes_of(folder: Path, loop: Callable[[Run], None] | None, **options: Any) -> list[str]:
    of_recipe = {"weight_decay": 0.0, "learning_rate": 0.01}
    chosen = dataclasses.replace(config(batch_size=8, epochs=2, log_every=1), **{**of_recipe, **options})
    spec = dataclasses.replace(make_spec(chosen, images(NUM_IMAGES), str(folder)), loop=loop)
    recorder = Recorder()
    train_run(spec, make_run(chosen, images(NUM_IMAGES), str(folder), recorder))
    return [event.text for event in recorder.events if isinstance(event, Note)]


def with_all(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    scheduler = run.prepare(run.build_scheduler(optimizer))
    average = run.prepare(WeightAverage(model, 0.9))
    for epoch in run.epochs():
        run.train_head_first(model, epoch)
        for batch in epoch:
            optimizer.zero_grad()
            for microbatch in batch.microbatches():
                run.loss(model(microbatch.images), microbatch.targets).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            average.update(batch.step)


def with_none(run: Run) -> None:
    model = run.prepare(run.build_model())
    run.evaluate()  # before the first step, after which the loop is told
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    fit(run, model, optimizer)


class Recipe:
    """A loop in a class, with a method and a function for parts of it, which reads options itself."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def __call__(self, run: Run) -> None:
        with_all(run) if run.config.accumulate == 0 else self.train(run)

    def train(self, run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=run.config.learning_rate))
        fit(run, model, optimizer)


@torch.enable_grad()
def behind_a_decorator(run: Run) -> None:
    with_all(run)


@cache
def all_of_it() -> Callable[[Run], None]:
    return with_all


def given_a_function(run: Run, part: Callable[[Run], None] = with_all) -> None:
    part(run)


def given_by_name(run: Run, *, part: Callable[[Run], None]) -> None:
    part(run)


@pytest.mark.parametrize(
    "loop",
    [behind_a_decorator, lambda run: all_of_it()(run), given_a_function, partial(given_by_name, part=with_all)],
)
def test_functions_behind_decorators_and_among_arguments_are_parts_of_a_loop(
    loop: Callable[[Run], None], tmp_path: Path
) -> None:
    assert notes_of(tmp_path, loop, **GIVEN) == []


def test_a_loop_that_uses_all_options_is_told_nothing(tmp_path: Path) -> None:
    assert notes_of(tmp_path / "own", with_all, **GIVEN) == []
    assert notes_of(tmp_path / "built-in", None, **GIVEN) == []
    assert notes_of(tmp_path / "partial", partial(Recipe.train, Recipe(0.9)), learning_rate=0.5) == []
    assert notes_of(tmp_path / "object", Recipe(0.9), **GIVEN) == []


def with_a_setting(run: Run, setting: type = ResolvedConfig) -> None:
    assert isinstance(run.config, setting)
    with_none(run)


def test_a_loop_that_names_the_class_of_options_does_not_use_them(tmp_path: Path) -> None:
    given = "--optimizer takes effect in run.build_optimizer, which the loop does not call"
    assert given in notes_of(tmp_path, with_a_setting, optimizer="adamw")


def test_each_call_that_a_loop_leaves_out_is_told_once_with_the_options_that_need_it(tmp_path: Path) -> None:
    assert sorted(notes_of(tmp_path, with_none, **GIVEN)) == sorted(
        [
            "--optimizer, --weight-decay take effect in run.build_optimizer, which the loop does not call",
            "--schedule takes effect in run.build_scheduler, which the loop does not call",
            "--label-smoothing takes effect in run.loss, which the loop does not call",
            "--accumulate takes effect in batch.microbatches, which the loop does not call",
            "--ema-decay takes effect in WeightAverage, which the loop does not call",
            "--clip-norm takes effect in clip_grad_norm_, which the loop does not call",
            "--mixup: the classes of mixed images are in batch.targets, not in batch.labels; the loop does not call "
            "run.loss, so its own loss has to take them",
        ]
    )


def test_a_comparison_knows_what_a_loop_does_not_use(tmp_path: Path) -> None:
    notes_of(tmp_path / "own", with_none, **GIVEN)
    unused = read_unused_options(open_store(str(tmp_path / "own")))
    assert {"optimizer", "weight_decay", "schedule", "learning_rate"} <= set(unused)
    assert "mixup" not in unused, "it takes effect in every loop"
    notes_of(tmp_path / "reads-the-rate", Recipe(0.9), **GIVEN)
    unused = read_unused_options(open_store(str(tmp_path / "reads-the-rate")))
    assert unused == ()  # its code refers to a loop that uses all
    notes_of(tmp_path / "built-in", None, **GIVEN)
    assert read_unused_options(open_store(str(tmp_path / "built-in"))) == ()


def with_labels(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    fit(run, model, optimizer, lambda model, batch: run.loss(model(batch.images), batch.labels))


@pytest.mark.parametrize("options", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_a_loss_that_gets_the_labels_of_mixed_images_is_told(options: dict[str, float], tmp_path: Path) -> None:
    [note] = notes_of(tmp_path / "mixed", with_labels, **options)
    assert note == (
        f"--{next(iter(options))}: run.loss gets the labels that the images had before they were mixed; give it "
        "batch.targets in place of batch.labels"
    )
    assert notes_of(tmp_path / "plain", with_labels) == []
    assert notes_of(tmp_path / "targets", with_all, **options) == []


@pytest.mark.parametrize("options", [{}, {"batch_norm": "aggregate", "flip": "random"}])
def test_options_that_take_effect_in_every_loop_are_not_told(options: dict[str, Any], tmp_path: Path) -> None:
    assert notes_of(tmp_path, with_none, **options) == []


def dropping(run: Run) -> None:
    """Drops what it sees by torch's function, which is no layer, and scales it by a number of NumPy's."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=run.config.learning_rate))
    for epoch in run.epochs():
        for batch in epoch:
            seen = F.dropout(batch.images, 0.1) * np.random.beta(1, 1)
            optimizer.zero_grad()
            F.cross_entropy(model(seen), batch.labels).backward()
            optimizer.step()


def test_a_loop_that_draws_numbers_is_told_that_it_depends_on_the_number_of_workers(tmp_path: Path) -> None:
    assert notes_of(tmp_path / "one", dropping) == []
    notes, others = run_in_processes(2, notes_of, tmp_path / "two", dropping)
    assert notes + others == [
        "the loop or its network draws random numbers from torch and NumPy: each worker draws its own, so that the run "
        "depends on the number of workers; docs/images.md names the layers with which it does not"
    ]


def clamping(run: Run) -> None:
    """A hook of a weight changes its gradient."""
    model = run.prepare(run.build_model())
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=run.config.learning_rate))
    fit(run, model, optimizer)


def test_a_hook_that_gets_the_gradient_of_one_worker_is_told(tmp_path: Path) -> None:
    assert notes_of(tmp_path / "one", clamping) == []
    notes, others = run_in_processes(2, notes_of, tmp_path / "two", clamping)
    [note] = notes + others
    assert note.startswith("a hook of a tensor gets the gradient of the mean over one worker's images")
    assert "register_post_accumulate_grad_hook" in note


def test_layers_that_draw_for_each_sample_are_not_told(tmp_path: Path) -> None:
    options = {"model": "tests.integration.test_augmented:dropping_network", "color_jitter": 0.3, "mixup": 0.2}
    assert run_in_processes(2, notes_of_built_in, tmp_path / "two", options) == [[], []]


def notes_of_built_in(folder: Path, options: dict[str, Any]) -> list[str]:
    return notes_of(folder, None, **options)


def ends_with_softmax(num_classes: int, channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(num_classes), torch.nn.Softmax(1))


@pytest.mark.parametrize("loop", [None, with_all])
def test_a_network_that_ends_with_softmax_is_told(loop: Callable[[Run], None] | None, tmp_path: Path) -> None:
    model = "tests.integration.test_unused_options:ends_with_softmax"
    assert notes_of(tmp_path, loop, model=model) == [
        "the network ends with a softmax, but run.loss takes logits: leave that layer out, so that the network learns "
        "faster"
    ]


def test_a_learning_rate_that_the_loop_does_not_read_is_told(tmp_path: Path) -> None:
    told = "--learning-rate takes effect in run.build_optimizer, which the loop does not call"
    assert notes_of(tmp_path / "given", with_none, learning_rate=0.5) == [told]
    assert notes_of(tmp_path / "the recipe's", with_none, learning_rate=0.01) == []
    assert notes_of(tmp_path / "built", with_all, learning_rate=0.5) == []
    assert notes_of(tmp_path / "searched", with_none, learning_rate=0.5, schedule="rising:1e-4..10") == []


def stops_after_two_steps(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            if batch.step == 1:
                return


def test_a_resume_on_another_number_of_workers_keeps_the_recipes_rate_and_is_told_nothing(tmp_path: Path) -> None:
    notes_of(tmp_path, stops_after_two_steps, learning_rate=0.03)  # as three workers begin with 0.01/worker
    assert notes_of(tmp_path, stops_after_two_steps, learning_rate=0.03) == []


def test_nor_is_one_of_a_run_that_had_made_no_step(tmp_path: Path) -> None:
    assert notes_of(tmp_path, stops_after_two_steps, learning_rate=0.03, resume=True) == []


class TwoOutputs(torch.nn.Module):
    """Returns logits and features."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.body = run.build_model()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(images), images.flatten(1)


class NeedsLabels(TwoOutputs):
    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(images)


def training(network: Callable[[Run], torch.nn.Module], *, evaluate: bool = False) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        model = run.prepare(network(run))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        measure = partial(evaluate_network, run, lambda images: model(images)[0])
        for epoch in run.epochs(measure if evaluate else None):
            for batch in epoch:
                given = (batch.images, batch.labels) if isinstance(model, NeedsLabels) else (batch.images,)
                optimizer.zero_grad()
                run.loss(model(*given)[0], batch.targets).backward()
                optimizer.step()

    return loop


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (TwoOutputs, "which returns a tuple for images alone; let it return logits"),
        (NeedsLabels, "which raises TypeError: .*missing 1 required positional argument: 'labels'"),
    ],
)
def test_a_network_that_the_evaluation_cannot_call_is_refused_after_the_first_step(
    network: type[TwoOutputs], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        notes_of(tmp_path, training(network))
    assert not list(tmp_path.rglob("*.pt"))


def test_a_network_with_an_evaluation_of_the_loops_own_is_not_tried(tmp_path: Path) -> None:
    assert notes_of(tmp_path, training(TwoOutputs, evaluate=True)) == []


def counted(calls: list[int]) -> Callable[[Run], None]:
    """A loop whose network counts the images of its calls."""

    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        model.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs():
            for batch in epoch:
                optimizer.zero_grad()
                run.loss(model(batch.images), batch.targets).backward()
                optimizer.step()

    return loop


def test_a_network_that_can_be_evaluated_is_tried_on_two_images_and_stays_as_it_is(tmp_path: Path) -> None:
    calls: list[int] = []
    [note] = notes_of(tmp_path, counted(calls))
    assert note.startswith("the loop has changed calls")  # as this test has it do
    assert calls[:3] == [8, 2, 8] and 2 not in calls[3:]


def with_a_scaled_rate(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.01 * run.world_size))
    fit(run, model, optimizer)


def test_a_rate_that_grows_with_the_workers_is_reported_on_several(tmp_path: Path) -> None:
    says = "a learning rate is computed with the number of workers"
    notes = run_in_processes(2, notes_of, tmp_path / "two", with_a_scaled_rate)[0]
    assert [note for note in notes if says in note]
    assert notes_of(tmp_path / "one", with_a_scaled_rate) == []
