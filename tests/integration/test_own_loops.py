"""Custom loops: the same results on any number of workers and after a resume, and the mistakes that are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raytrain.errors import LoopFailed, UsageError
from raytrain.monitor.events import CheckpointWritten, Note
from raytrain.runs.outcome import StopReason
from raytrain.training.assembly import train_run
from raytrain.training.evaluation import evaluate
from raytrain.training.prepared_models import WeightAverage
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.integration.test_exact import Recorder, config, images, make_run, make_spec, weights_of

OPTIONS = config(batch_size=7, epochs=2, log_every=1)  # 6 steps per epoch.
NUM_IMAGES = 38


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def clipping(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer, clip_norm=0.1)


def own_schedule(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.RMSprop(model.parameters()))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer, learning_rate=0.01 / (1 + batch.step))


def distillation(run: Run) -> None:
    teacher = run.build_model().double().eval()
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in run.batches():
        with torch.no_grad():
            target = teacher(batch.images).softmax(dim=1)
        run.backward(F.kl_div(model(batch.images).log_softmax(dim=1), target, reduction="sum"))
        run.step(optimizer)


def several_models(run: Run) -> None:
    models = [
        run.prepare(run.build_model()),
        run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes))),
    ]
    optimizers = [run.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    for batch in run.batches():
        for model, optimizer in zip(models, optimizers, strict=True):
            run.backward(cross_entropy(model(batch.images), batch.labels))
            run.step(optimizer)


def averaged_weights(run: Run) -> None:
    model = run.prepare(run.build_model())
    average = run.prepare(
        AveragedModel(run.build_model(), multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    )
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches(evaluate=lambda: evaluate(run, average)):
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        average.update_parameters(model)


def metrics_of_its_own(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():
        logits = model(batch.images)
        loss = cross_entropy(logits, batch.labels)
        run.backward(loss)
        run.step(optimizer)
        in_two = (logits.topk(2).indices == batch.labels[:, None]).sum()
        run.log(loss=loss.item(), correct=(logits.argmax(dim=1) == batch.labels).sum(), in_two=in_two)


def evaluation_of_its_own(run: Run) -> None:
    def worst_class() -> dict[str, float]:
        counts = torch.zeros(2, run.num_classes, dtype=torch.float64)  # Correct and total images of each class.
        for batch in run.test_batches():
            right = model(batch.images).argmax(dim=1) == batch.labels
            counts += torch.stack(
                [torch.bincount(batch.labels[which], minlength=run.num_classes) for which in (right, slice(None))]
            )
        right, total = torch.tensor(run.total(counts.flatten())).view(2, -1)
        return {"accuracy": (right.sum() / total.sum()).item(), "worst_class": (right / total).min().item()}

    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches(evaluate=worst_class):
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        if batch.step % 4 == 3:
            run.evaluate()  # In the middle of an epoch.


class TwoPaths(nn.Module):
    """A network with a method of its own, a layer that is never used, and one that every second step leaves out."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.Tanh())
        self.extra = nn.Linear(16, 16)
        self.unused = nn.Linear(7, 7)
        self.head = nn.Linear(16, num_classes)
        self.step = 0

    def encode(self, images: Tensor) -> Tensor:
        self.step += 1
        features = self.body(images)
        return features + self.extra(features) if self.step % 2 else features

    def forward(self, images: Tensor) -> dict[str, Any]:
        return {"logits": self.head(self.encode(images)), "step": self.step}


def methods_and_layers_left_out(run: Run) -> None:
    """Train the network that was given to prepare, by its methods, with weight decay that unused layers don't get."""
    network = TwoPaths(run.num_classes)
    assert run.prepare(network) is network
    network.step = run.progress.step
    optimizer = run.prepare(torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9))
    for batch in run.batches(evaluate=dict):
        run.backward(cross_entropy(network.head(network.encode(batch.images)), batch.labels))
        run.step(optimizer)


def unfreezing(run: Run) -> None:
    """Train the head for two steps, then all layers, and a temperature of the loop's own."""
    model = run.prepare(TwoPaths(run.num_classes))
    temperature = nn.Parameter(torch.ones(()))
    run.prepare(nn.ParameterList([temperature]))
    optimizer = run.prepare(torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
    for batch in run.batches(evaluate=dict):
        model.body.requires_grad_(batch.step >= 2)
        model.step = 0
        run.backward(cross_entropy(model(batch.images)["logits"] * temperature, batch.labels))
        run.step(optimizer)


def torch_scheduler(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler = run.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=13))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        scheduler.step()


def sharpness_aware(run: Run) -> None:
    """Two backwards a step, whose gradients are used before and in the step."""
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        ascents = [(each, 0.05 * each.grad) for each in model.parameters() if each.grad is not None]
        with torch.no_grad():
            for parameter, ascent in ascents:
                parameter += ascent
        optimizer.zero_grad()
        run.backward(cross_entropy(model(batch.images), batch.labels))
        with torch.no_grad():
            for parameter, ascent in ascents:
                parameter -= ascent
        run.step(optimizer)


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


def wraps_an_optimizer(run: Run) -> None:
    """A class that wraps another optimizer, whose state is its own, under a scheduler."""
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(Wrapping(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    scheduler = run.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=run.plan.num_steps))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        scheduler.step()


class Several(torch.optim.Optimizer):
    """One optimizer for matrices and one for vectors, as if they were one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for each in parts for group in each.param_groups], {})
        self.parts = list(parts)

    def step(self, closure: Any = None) -> Any:
        for each in self.parts:
            each.step()


def several_as_one(run: Run) -> None:
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    matrix, vector = model.parameters()
    parts = torch.optim.SGD([matrix], lr=0.1, momentum=0.9), torch.optim.AdamW([vector], lr=0.01)
    optimizer = run.prepare(Several(*parts))
    scheduler = run.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=run.plan.num_steps))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        scheduler.step()


SAME_ON_ANY_WORKERS = (
    wraps_an_optimizer,
    several_as_one,
    clipping,
    own_schedule,
    methods_and_layers_left_out,
    torch_scheduler,
    sharpness_aware,
    distillation,
    several_models,
    averaged_weights,
    metrics_of_its_own,
    evaluation_of_its_own,
)


def mixup(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():
        other, part = torch.randperm(len(batch.labels)), torch.rand(())
        logits = model(part * batch.images + (1 - part) * batch.images[other])
        run.backward(
            part * cross_entropy(logits, batch.labels) + (1 - part) * cross_entropy(logits, batch.labels[other])
        )
        run.step(optimizer)


def two_optimizers_against_each_other(run: Run) -> None:
    """Train a generator and a critic."""
    generator = run.prepare(nn.Sequential(nn.Linear(4, 3 * 8 * 8), nn.Tanh(), nn.Unflatten(1, (3, 8, 8))))
    critic = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 1)))
    makes, judges = (run.prepare(torch.optim.Adam(model.parameters(), lr=0.001)) for model in (generator, critic))
    for batch in run.batches(evaluate=dict):
        made = generator(torch.randn(len(batch.labels), 4, dtype=batch.images.dtype))
        fake = F.softplus(critic(made.detach())).sum()
        real = F.softplus(-critic(batch.images)).sum()
        run.backward(fake + real)
        run.step(judges)
        run.backward(F.softplus(-critic(made)).sum())
        run.step(makes)
        judges.zero_grad()  # The generator's loss also gave gradients to the critic.
        run.log(critic_loss=fake + real)


SAME_AFTER_A_STOP = (*SAME_ON_ANY_WORKERS, mixup, two_optimizers_against_each_other)


def train_with(loops: list[Callable[[Run], None]], folder: str, stop_after: int | None = None) -> dict[str, Any]:
    """Train with each loop, and return the weights, metrics and outcome by the loop's name."""
    results = {}
    for loop in loops:
        recorder = Recorder(stop_after)
        run = make_run(OPTIONS, images(NUM_IMAGES), f"{folder}/{loop.__name__}", recorder)
        loop(run)
        outcome = run.finish()
        weights = [value.clone() for model in run.models.trained for value in model.state_dict().values()]
        results[loop.__name__] = {"weights": weights, "rows": recorder.rows, "outcome": outcome}
    return results


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all loops on two workers without a stop."""
    return run_in_processes(2, train_with, list(SAME_AFTER_A_STOP), str(tmp_path_factory.mktemp("two")))[0]


def assert_same_weights(name: str, ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other.double()).abs().max().item() <= tolerance, name


def test_custom_loops_compute_the_same_on_any_number_of_workers(on_two: dict[str, Any], tmp_path: Path) -> None:
    for name, alone in train_with(list(SAME_ON_ANY_WORKERS), str(tmp_path)).items():
        assert_same_weights(name, on_two[name]["weights"], alone["weights"], 1e-10)
        for ours, theirs in zip(on_two[name]["rows"], alone["rows"], strict=True):
            assert set(ours.metrics) == set(theirs.metrics), name
            for what in ("step", "epoch", "samples_seen", "learning_rate", *ours.metrics):
                assert ours.value(what) == pytest.approx(theirs.value(what), abs=1e-9), (name, what)


def test_custom_loops_end_with_the_same_weights_after_a_stop_and_resume(on_two: dict[str, Any], tmp_path: Path) -> None:
    loops = list(SAME_AFTER_A_STOP)
    stopped = run_in_processes(2, train_with, loops, str(tmp_path), 4)[0]
    assert all(result["outcome"].status == "stopped" for result in stopped.values())
    resumed = run_in_processes(2, train_with, loops, str(tmp_path))[0]
    for name, result in resumed.items():
        assert_same_weights(name, result["weights"], on_two[name]["weights"], 0.0)


def test_custom_metrics_are_in_the_history(on_two: dict[str, Any]) -> None:
    steps = [row for row in on_two["metrics_of_its_own"]["rows"] if row.kind == "step"]
    assert len(steps) == 12
    assert all(row.accuracy <= row.metrics["in_two"] <= 1 for row in steps)
    measured = [row for row in on_two["evaluation_of_its_own"]["rows"] if row.kind == "evaluation"]
    assert [row.step for row in measured] == [4, 6, 8, 12, 12]
    assert all(0 <= row.metrics["worst_class"] <= row.accuracy for row in measured)
    steps = [row for row in on_two["two_optimizers_against_each_other"]["rows"] if row.kind == "step"]
    assert [row.metrics["critic_loss"] > 0 for row in steps] == [True] * 12


def steps_of(run: Run) -> Iterator[int]:
    """Train, and give the number of each step that is done."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        yield batch.step


def returns_early(run: Run) -> None:
    for step in steps_of(run):
        if step == 4:
            break


def to_the_end(run: Run) -> None:
    for _ in steps_of(run):
        pass


def return_early_and_resume(folder: str) -> list[Tensor]:
    for loop in (returns_early, to_the_end):
        run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
        loop(run)
        outcome = run.finish()
        assert outcome.progress.step == (5 if loop is returns_early else 12)
        assert outcome.status == ("stopped" if loop is returns_early else "finished")
        assert outcome.stop_reason == (StopReason("caller", "the loop returned") if loop is returns_early else None)
        if run.rank == 0:  # which writes them
            assert outcome.checkpoint == f"checkpoints/step-{outcome.progress.step:09d}.pt"
    return list(weights_of(run).values())


def test_a_loop_that_returns_early_on_all_workers_writes_a_checkpoint(tmp_path: Path) -> None:
    ours = run_in_processes(2, return_early_and_resume, str(tmp_path / "early"))[0]
    theirs = run_in_processes(2, train_with, [to_the_end], str(tmp_path))[0]["to_the_end"]["weights"]
    assert_same_weights("returns early", ours, theirs, 0.0)


def one_returns(folder: str) -> str:
    """Train with a loop that returns early on worker 1; return the error message of this worker."""

    def loop(run: Run) -> None:
        model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
        optimizer = run.prepare(run.build_optimizer(model))
        for batch in run.batches():
            run.backward(cross_entropy(model(batch.images), batch.labels))
            run.step(optimizer)
            if batch.step == 4 and run.rank == 1:
                break

    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
    try:
        loop(run)
        run.finish()
    except UsageError as error:
        return str(error)
    except RuntimeError:
        return "the other worker is gone"
    return "nothing"


@pytest.mark.slow  # The other worker waits a minute for the one that returned.
def test_a_loop_that_returns_early_on_some_workers_is_refused(tmp_path: Path) -> None:
    _, error = run_in_processes(2, one_returns, str(tmp_path))
    assert error.startswith("After step 5 the loop returned on 1 of 2 workers")


def drops_a_layer_on_one_worker(folder: str) -> list[float]:
    """Train a network whose worker 1 leaves a layer out; the largest difference of a weight between the workers."""
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
    model = run.prepare(TwoPaths(run.num_classes))
    optimizer = run.prepare(run.build_optimizer(model))
    before = model.extra.weight.detach().clone()
    for batch in run.batches(evaluate=dict):
        model.step = run.rank
        run.backward(cross_entropy(model(batch.images)["logits"], batch.labels))
        run.step(optimizer)
    run.finish()
    assert not torch.equal(model.extra.weight, before)
    rows = run.gather(torch.cat([each.detach().flatten() for each in model.parameters()])[None])
    return [float(abs(rows[0] - rows[1]).max())]


def test_a_layer_that_only_some_workers_use_stays_the_same_on_all(tmp_path: Path) -> None:
    assert run_in_processes(2, drops_a_layer_on_one_worker, str(tmp_path)) == [[0.0], [0.0]]


def test_unfrozen_layers_and_single_parameters_train_as_on_one_worker(tmp_path: Path) -> None:
    ours = run_in_processes(2, train_with, [unfreezing], str(tmp_path / "two"))[0]["unfreezing"]
    theirs = train_with([unfreezing], str(tmp_path / "one"))["unfreezing"]
    assert_same_weights("unfreezing", ours["weights"], theirs["weights"], 1e-10)


def test_layers_that_their_author_keeps_in_evaluation_mode_stay_so(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    model, teacher = (run.prepare(run.build_model()) for _ in range(2))
    norm = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)).eval()
    before = norm.running_mean.clone()  # pyright: ignore[reportOptionalMemberAccess]
    teacher.eval()
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        assert (model.training, norm.training, teacher.training) == (True, False, False)
    assert torch.equal(norm.running_mean, before)  # pyright: ignore[reportArgumentType]


def test_mixed_precision_is_that_of_the_loop_for_methods_copies_and_nested_outputs(tmp_path: Path) -> None:
    run = make_run(config(batch_size=7, precision="bfloat16"), images(NUM_IMAGES), str(tmp_path), Recorder())
    model = run.prepare(TwoPaths(run.num_classes))
    for batch in run.batches():
        outputs = model(batch.images)
        assert outputs["logits"].dtype == torch.float32 and outputs["step"] == 1
        assert model.encode(batch.images).dtype == torch.bfloat16
        other = copy.deepcopy(model)
        nn.init.zeros_(other.head.weight)
        assert torch.equal(other(batch.images)["logits"], other.head.bias.bfloat16().expand(7, -1).float())
        break
    assert isinstance(run.prepare(nn.BatchNorm2d(3)), nn.BatchNorm2d)
    assert pickle.loads(pickle.dumps(run.models.trained[1])).training


def test_a_scheduler_beside_the_schedule_of_the_options_is_refused(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, schedule="cosine")
    run = make_run(options, images(NUM_IMAGES), str(tmp_path), Recorder())
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(UsageError, match="and so do --schedule cosine"):
        run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        optimizer.param_groups[0]["lr"] = 0.1
        with pytest.raises(UsageError, match="and so do --schedule cosine"):
            run.step(optimizer)
        break


class Recording(torch.optim.SGD):
    """Keeps a copy of the gradients that it steps with."""

    def step(self, closure: Any = None) -> Any:
        self.got = [each.grad.clone() for group in self.param_groups for each in group["params"]]
        return super().step(closure)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_gradients_have_no_scale_in_the_loop_and_in_each_of_two_optimizers(precision: str, tmp_path: Path) -> None:
    run = make_run(config(batch_size=7, precision=precision), images(NUM_IMAGES), str(tmp_path), Recorder())
    head, body = nn.Linear(16, run.num_classes), nn.Linear(3 * 8 * 8, 16)
    model = run.prepare(nn.Sequential(nn.Flatten(), body, head))
    optimizers = [run.prepare(Recording(each.parameters(), lr=0.1)) for each in (head, body)]
    reference = copy.deepcopy(model)
    for batch in run.batches(evaluate=dict):
        reference.load_state_dict(model.state_dict())
        reference.zero_grad()
        F.cross_entropy(reference(batch.images), batch.labels).backward()
        for _ in range(2):  # halves, which add up
            run.backward(cross_entropy(model(batch.images), batch.labels) / 2)
        wanted = [gradients_of(each) for each in (reference[2], reference[1])]
        torch.testing.assert_close([gradients_of(head), gradients_of(body)], wanted, rtol=0.02, atol=2e-3)
        torch._foreach_mul_(gradients_of(model), 2.0)  # pyright: ignore[reportPrivateImportUsage]
        for optimizer in optimizers:
            run.step(optimizer)
        got = [[each / 2 for each in optimizer.got] for optimizer in optimizers]
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=2e-3)


def draws(run: Run) -> list[tuple[float, ...]]:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    drawn: list[tuple[float, ...]] = []
    for batch in run.batches():
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
    return drawn


def all_draws(folder: str) -> list[list[tuple[float, ...]]]:
    return [draws(make_run(OPTIONS, images(NUM_IMAGES), f"{folder}/{name}", Recorder())) for name in ("a", "b")]


def test_every_generator_repeats_in_a_repeated_run_and_differs_between_steps_and_workers(tmp_path: Path) -> None:
    (first, again), (other, _) = run_in_processes(2, all_draws, str(tmp_path))
    assert first == again
    numbers = [number for step in (*first, *other) for number in step]
    assert len(set(numbers)) == len(numbers) == 2 * 12 * 3


def test_an_optimizer_has_the_options_of_the_start_that_resumes(tmp_path: Path) -> None:
    for learning_rate, weight_decay, stop_after in ((0.1, 0.0, 3), (0.1, 0.5, 3), (0.2, 0.5, 3)):
        options = dataclasses.replace(OPTIONS, learning_rate=learning_rate, weight_decay=weight_decay)
        run = make_run(options, images(NUM_IMAGES), str(tmp_path), Recorder(stop_after))
        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"]) == (learning_rate, weight_decay)
        for batch in run.batches():
            run.backward(cross_entropy(model(batch.images), batch.labels))
            run.step(optimizer)
        run.finish()
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match=r"optimizer has the options .*momentum.*prepares Adam"):
        run.prepare(torch.optim.Adam(run.prepare(run.build_model()).parameters()))


def mean(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(F.cross_entropy(model(batch.images), batch.labels))


def vector(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(F.cross_entropy(model(batch.images), batch.labels, reduction="none"))


def mean_of_own(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward((model(batch.images) ** 2).sum(dim=1).mean())


def mean_by_hand(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels) / len(batch.labels))


def mean_in_a_sum(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    logits = model(batch.images)
    run.backward(0.7 * F.cross_entropy(logits, batch.labels) + 0.3 * F.cross_entropy(logits, batch.labels.flip(0)))


def mean_of_soft_targets(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(F.cross_entropy(model(batch.images), torch.full((7, 4), 0.25, dtype=torch.float64)))


def scheduler_that_is_not_prepared(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run.backward(cross_entropy(model(batch.images), batch.labels))
    run.step(optimizer)


def prepares_a_script(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    script: Any = torch.jit.trace(copy.deepcopy(model).eval(), batch.images)
    run.prepare(script)


def steps_itself(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels))
    optimizer.step()


def no_gradient(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels).detach())


def no_step(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels))


def no_backward(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    cross_entropy(model(batch.images), batch.labels).backward()
    run.step(optimizer)


def logs_a_vector(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.log(loss=F.cross_entropy(model(batch.images), batch.labels, reduction="none"))


def logs_a_mean(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    loss = cross_entropy(model(batch.images), batch.labels)
    run.backward(loss)
    run.log(sum=loss, twice=2 * loss)
    run.log(loss=loss / len(batch.labels))


def lowers_the_rate_below_0(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels))
    run.step(optimizer, learning_rate=-0.1)


def clips_to_0(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels))
    run.step(optimizer, clip_norm=0.0)


def gives_a_number_for_a_closure(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels))
    run.step(optimizer, 0.1)  # pyright: ignore


def steps_a_network(run: Run, model: Any, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels))
    run.step(model)


def no_tensor(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels).item())  # pyright: ignore


def one_logit(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.log(correct=run.correct(model(batch.images)[:, :1], batch))


def prepares_a_dictionary(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.prepare({"best": 0.0})  # pyright: ignore


def prepares_two_at_once(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.prepare((model, optimizer))  # pyright: ignore


def prepares_a_class(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.prepare(nn.Linear)  # pyright: ignore


def steps_in_each_part(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    for part in run.parts(batch):
        run.backward(cross_entropy(model(part.images), part.labels))
        run.step(optimizer)


def leaves_the_parts(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    for part in run.parts(batch):
        run.backward(cross_entropy(model(part.images), part.labels))
        break
    run.step(optimizer)


class Window:
    def __init__(self, losses: Any = None) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_an_evaluation_before_a_network_is_prepared_is_refused(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match="the loop has prepared no network; give it to run"):
        run.evaluate()


def logs_an_epoch(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.log(loss=1.0, epoch=batch.epoch)


def logs_a_second_rate(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.log(second_learning_rate=0.1)


def logs_accuracy_twice(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.log(correct=1.0, accuracy=0.5)


def trains_a_loose_parameter(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    own = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [own]})
    run.backward(cross_entropy(model(batch.images), batch.labels) + own.sum())
    run.step(optimizer)


def steps_what_is_not_prepared(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model(batch.images), batch.labels))
    run.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_state_that_no_checkpoint_can_hold_is_refused_when_it_is_prepared(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match=r"prepares as state .* holds collections.deque, which"):
        run.prepare(Window(deque([0.0])))


def test_a_state_that_no_checkpoint_can_hold_later_is_refused_when_the_first_is_written(tmp_path: Path) -> None:
    def with_window(run: Run) -> None:
        run.prepare(Window()).losses = deque([0.0])
        to_the_end(run)

    with pytest.raises(UsageError, match=r"prepares as state .* holds collections.deque, which"):
        train_with([with_window], str(tmp_path))


def train_with_body(run: Run, model: nn.Module, optimizer: Any, body: Callable[..., None]) -> None:
    for batch in run.batches():
        body(run, model, optimizer, batch)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (mean, "got a mean over the images; give it a sum"),
        (mean_of_own, "got a mean over the images; give it a sum"),
        (mean_by_hand, "got a mean over the images; give it a sum"),
        (mean_in_a_sum, "got a mean over the images; give it a sum"),
        (mean_of_soft_targets, "got a mean over the images; give it a sum"),
        (scheduler_that_is_not_prepared, "has a scheduler that no checkpoint would hold"),
        (prepares_a_script, "got a network of torch.jit"),
        (steps_itself, r"calls optimizer.step\(\) itself; call run.step"),
        (vector, r"a loss of shape \(7,\)"),
        (no_gradient, "a loss without a gradient"),
        (no_step, r"without run.step\(optimizer\) for this one"),
        (no_backward, "run.step without run.backward"),
        (logs_a_vector, r"run.log\(loss=...\) got a tensor of shape \(7,\)"),
        (logs_an_epoch, r"run.log\(epoch=...\) would replace what the metrics history has as epoch already; give it"),
        (
            logs_a_second_rate,
            r"run.log\(second_learning_rate=...\) would replace what the metrics history has as second",
        ),
        (logs_accuracy_twice, r"run.log\(correct=...\) would replace what the metrics history has as accuracy already"),
        (logs_a_mean, r"run.log\(loss=...\) got a mean over the images; give it a sum"),
        (trains_a_loose_parameter, r"trains a parameter of the shape \(3,\) that is in no prepared network"),
        (lowers_the_rate_below_0, r"run.step got learning_rate=-0.1; give a number of at least 0"),
        (clips_to_0, r"run.step got clip_norm=0.0; give a number above 0"),
        (gives_a_number_for_a_closure, r"run.step got a float for its closure, a function that computes the loss"),
        (steps_a_network, r"run.step got a \w+; give it the optimizer that run.prepare returned"),
        (no_tensor, r"run.backward got a float; give it the loss, a tensor"),
        (one_logit, r"run.correct got logits of the shape \(7, 1\) for 7 images and 4 classes"),
        (prepares_a_dictionary, r"run.prepare got a dict; give it one thing with state_dict and load_state_dict"),
        (prepares_two_at_once, r"run.prepare got a tuple; give it one thing"),
        (prepares_a_class, r"run.prepare got the class Linear; give it one thing"),
        (steps_what_is_not_prepared, r"an optimizer that no checkpoint would hold; give it to run.prepare first"),
    ],
)
def test_a_mistake_in_a_loop_is_reported_in_the_first_step(
    body: Callable[..., None], sentence: str, tmp_path: Path
) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for _ in range(2):  # also if the loop has swallowed it
        with pytest.raises(UsageError, match=sentence):
            train_with_body(run, model, optimizer, body)
    assert run.progress.step == 0


@pytest.mark.parametrize("body", [steps_in_each_part, leaves_the_parts])
def test_a_step_before_the_last_part_is_refused(body: Callable[..., None], tmp_path: Path) -> None:
    run = make_run(dataclasses.replace(OPTIONS, accumulate=2), images(NUM_IMAGES), str(tmp_path), Recorder())
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    with pytest.raises(UsageError, match=r"run.step before the last part of its batch; call it once, after the loop"):
        train_with_body(run, model, optimizer, body)


def test_a_backward_before_the_first_batch_is_refused(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match=r"calls run.backward before it has a batch"):
        run.backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("decay", [1.0, 9, -0.1])
def test_an_average_with_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(UsageError, match="WeightAverage got a decay of"):
        WeightAverage(nn.Linear(2, 2), decay)


def test_an_average_that_gets_a_network_for_a_step_is_refused() -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"WeightAverage.update got a Linear; give it batch.step"):
        WeightAverage(network, 0.9).update(network)  # pyright: ignore


def with_rates_in_tensors(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.125)))
    scheduler = run.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer, learning_rate=torch.tensor(0.5) if batch.step > 1 else None)  # pyright: ignore
        scheduler.step()


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    recorder = Recorder()
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), recorder)
    with_rates_in_tensors(run)
    rates = [row.learning_rate for row in recorder.rows if row.kind == "step"]
    assert rates[:3] == [0.125, 0.0625, 0.5] and {type(rate) for rate in rates} == {float}


def train_measured(run: Run, evaluate: Callable[[], dict[str, float]]) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches(evaluate):
        run.backward(run.loss(model(batch.images), batch.targets))
        run.step(optimizer)


def test_a_mean_over_the_global_batch_is_refused_where_a_worker_or_a_part_has_fewer_images(tmp_path: Path) -> None:
    run = make_run(dataclasses.replace(OPTIONS, accumulate=2), images(NUM_IMAGES), str(tmp_path), Recorder())
    model = run.prepare(run.build_model())
    batch = next(run.batches())
    part = next(run.parts(batch))
    assert 4 < batch.num_used > part.num_used
    with pytest.raises(UsageError, match="got a mean over the images; give it a sum"):
        run.backward(cross_entropy(model(part.images), part.labels) / run.config.batch_size)


@pytest.mark.parametrize("measured", [None, 0.5, {"accuracy": {"top 5": 0.5}}, {"accuracy": "high"}])
def test_an_evaluation_of_a_loops_own_that_returns_no_numbers_by_name_is_refused(measured: Any, tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match="evaluation must return numbers by name"):
        train_measured(run, lambda: measured)


def logs_seldom(run: Run) -> None:
    """Logs one metric in each step, one in every second one, and one in the first epoch alone."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():
        run.backward(run.loss(model(batch.images), batch.targets))
        run.log(always=2.0 * batch.num_used)
        if batch.step % 2:
            run.log(seldom=3.0 * batch.num_used)
        if batch.epoch == 0:
            run.log(early=4.0 * batch.num_used)
        run.step(optimizer)


def rows_of_logs(folder: str) -> list[dict[str, float | None]]:
    recorder = Recorder()
    logs_seldom(run := make_run(dataclasses.replace(OPTIONS, log_every=3), images(NUM_IMAGES), folder, recorder))
    run.finish()
    return [dict(row.metrics) for row in recorder.rows if row.kind == "step"]


def test_a_metric_is_the_mean_over_the_images_of_the_steps_in_which_it_was_logged(tmp_path: Path) -> None:
    all_three = {"always": 2.0, "seldom": 3.0, "early": 4.0}
    late = {"always": 2.0, "seldom": 3.0}
    expected = [{"always": 2.0, "early": 4.0}, all_three, all_three, late, late]
    assert rows_of_logs(str(tmp_path / "one")) == expected
    assert run_in_processes(2, rows_of_logs, str(tmp_path / "two"))[0] == expected


def totals_and_rows(folder: str) -> list[Any]:
    """What workers with ranks from 0 add up and gather, given in the forms in which a loop may have it."""
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
    model = run.prepare(run.build_model())
    batch = next(run.batches())
    loss = cross_entropy(model(batch.images), batch.labels)
    before = loss.item()
    totals = [run.total(each) for each in ([1.5, run.rank], torch.tensor([True, run.rank > 0]), loss[None])]
    assert loss.item() == before  # what was given stays as it is
    rows = run.gather(model(batch.images).bfloat16()), run.gather(np.full(2, run.rank))
    return [*totals[:2], totals[2][0], before, rows[0].dtype.name, len(rows[0]), rows[1].tolist()]


def test_totals_and_rows_are_taken_in_any_form_and_stay_as_they_are(tmp_path: Path) -> None:
    *one, loss, before, kind, num_rows, ranks = totals_and_rows(str(tmp_path / "one"))
    assert (one, loss, kind, num_rows, ranks) == ([[1.5, 0], [1, 0]], before, "float32", 7, [0, 0])
    two = run_in_processes(2, totals_and_rows, str(tmp_path / "two"))
    for *sums, total, _, kind, num_rows, ranks in two:
        assert (sums, kind, num_rows, ranks) == ([[3.0, 1], [2, 1]], "float32", 7, [0, 0, 1, 1])
        assert total == pytest.approx(sum(each[3] for each in two)) == pytest.approx(loss)


def measured_by(evaluation: Callable[[Run], dict[str, float]]) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        for batch in run.batches(lambda: evaluation(run)):
            run.backward(run.loss(model(batch.images), batch.targets))
            run.step(optimizer)

    return loop


def trained_by(loop: Callable[[Run], None], folder: Path, **options: Any) -> Run:
    chosen = dataclasses.replace(OPTIONS, checkpoint_every=("none",), **options)
    run = make_run(chosen, images(NUM_IMAGES), str(folder), Recorder())
    train_run(dataclasses.replace(make_spec(chosen, images(NUM_IMAGES), str(folder)), loop=loop), run)
    return run


def test_an_evaluation_that_fails_loses_no_step_and_is_made_up_for_when_it_is_mended(tmp_path: Path) -> None:
    def fails(run: Run) -> dict[str, float]:
        return {"accuracy": 1 / 0}

    def works(run: Run) -> dict[str, float]:
        asked.append(run.progress.step)
        return {"accuracy": 0.5}

    asked: list[int] = []
    with pytest.raises(LoopFailed, match="ZeroDivisionError"):
        trained_by(measured_by(fails), tmp_path / "mended")
    resumed = trained_by(measured_by(works), tmp_path / "mended", resume=True)
    assert asked == [6, 12]  # of the epoch after which the first one had failed, too
    whole = trained_by(measured_by(works), tmp_path / "whole")
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)
    for folder in ("mended", "whole"):
        note = json.loads(next((tmp_path / folder).rglob("step-000000012.pt.json")).read_text())
        assert note["score"] == 0.5


def test_an_evaluation_that_would_replace_what_the_history_has_is_refused(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match="evaluation returned step, which the metrics history has already; give it an"):
        train_measured(run, lambda: {"accuracy": 0.5, "step": 3.0})


LossOf = Callable[[nn.Sequential, Any], Tensor]


def weight_of(model: nn.Sequential) -> Tensor:
    return next(model.parameters())


def penalised(model: nn.Sequential, batch: Any) -> Tensor:
    return cross_entropy(model(batch.images), batch.labels) + 0.1 * weight_of(model).square().sum()


def penalised_per_image(model: nn.Sequential, batch: Any) -> Tensor:
    mean = F.cross_entropy(model(batch.images), batch.labels)
    return batch.num_used * (mean + 0.1 * weight_of(model).square().sum())


def anchored(model: nn.Sequential, batch: Any) -> Tensor:
    weight = weight_of(model)
    loss = cross_entropy(model(batch.images), batch.labels)
    return loss + (weight - torch.ones_like(weight)).square().sum()


def told_apart(model: nn.Sequential, batch: Any) -> Tensor:
    features = model(batch.images)
    return (features[:, None] - features[None]).square().sum()


def contrasted(model: nn.Sequential, batch: Any) -> Tensor:
    features = F.normalize(model(batch.images))
    return cross_entropy(features @ features.T, torch.arange(len(features)))


def image_by_image(model: nn.Sequential, batch: Any) -> Tensor:
    return torch.stack(
        [F.cross_entropy(model(batch.images[i : i + 1]), batch.labels[i : i + 1]) for i in range(3)]
    ).sum()


OF_WEIGHTS, COMPARES = "a term of the loss depends on weights alone", "the loss compares the images of a worker"
TOLD: dict[LossOf, list[str]] = {
    penalised: [OF_WEIGHTS],
    anchored: [OF_WEIGHTS],
    penalised_per_image: [],
    told_apart: [COMPARES],
    contrasted: [COMPARES],
    image_by_image: [],
}


def notes_of(folder: str) -> list[list[str]]:
    """The notes of a few steps with each loss."""
    return [notes_with(f"{folder}/{loss_of.__name__}", loss_of) for loss_of in TOLD]


def notes_with(folder: str, loss_of: LossOf) -> list[str]:
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, recorder := Recorder())
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in islice(run.batches(evaluate=dict), 3):
        run.backward(loss_of(model, batch))
        run.step(optimizer)
    return [event.text for event in recorder.events if isinstance(event, Note)]


def test_what_depends_on_the_number_of_workers_is_told_once(tmp_path: Path) -> None:
    first, other = run_in_processes(2, notes_of, str(tmp_path))
    for told, wanted in zip(first, TOLD.values(), strict=True):
        assert [text[: len(beginning)] for text, beginning in zip(told, wanted, strict=True)] == wanted
    assert not any(other)


class Rates:
    """A scheduler that is none of torch's: it sets the rate of the first step when it is made."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.step = optimizer, 0
        self.set()

    def set(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def with_rates(run: Run) -> None:
    model = run.prepare(run.build_model())
    rates = run.prepare(Rates(optimizer := run.prepare(torch.optim.SGD(model.parameters(), lr=0.5))))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        rates.step += 1
        rates.set()


def test_a_scheduler_that_is_none_of_torchs_goes_on_after_a_resume(tmp_path: Path) -> None:
    whole = train_with([with_rates], str(tmp_path / "whole"))["with_rates"]["weights"]
    train_with([with_rates], str(tmp_path / "stopped"), 4)
    resumed = train_with([with_rates], str(tmp_path / "stopped"))["with_rates"]["weights"]
    assert_same_weights("with_rates", resumed, whole, 0.0)


def test_batches_that_are_asked_for_again_after_the_last_epoch_are_refused(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    to_the_end(run)
    with pytest.raises(UsageError, match=r"calls run.batches\(\) again after 12 steps"):
        next(iter(run.batches()))


def half_by_half(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for _ in range(2):
        for batch in islice(run.batches(), 6):
            run.backward(cross_entropy(model(batch.images), batch.labels))
            run.step(optimizer)


@pytest.mark.parametrize("stop_after", [3, 5, 6, 9])
def test_a_loop_that_leaves_the_batches_after_each_epoch_stops_and_resumes(stop_after: int, tmp_path: Path) -> None:
    half_by_half(run := make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder(stop_after)))
    stopped = run.finish()
    assert (stopped.status, stopped.stop_reason) == ("stopped", None) and stopped.progress.step <= stop_after + 1
    half_by_half(run := make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder()))
    assert run.finish().status == "finished"
    half_by_half(whole := make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path / "whole"), Recorder()))
    whole.finish()
    torch.testing.assert_close(weights_of(run), weights_of(whole), rtol=0, atol=0)


def test_a_loop_that_leaves_the_batches_after_the_last_step_is_evaluated(tmp_path: Path) -> None:
    recorder = Recorder()
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), recorder)
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        if batch.step == 11:
            break
    outcome = run.finish()
    assert (outcome.status, outcome.stop_reason, outcome.progress.evaluated_step) == ("finished", None, 12)
    assert [row.step for row in recorder.rows if row.kind == "evaluation"] == [6, 12]


def with_a_backward_of_its_own(folder: str) -> str:
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    try:
        for batch in run.batches():
            logits = model(batch.images)
            logits.square().sum().backward(retain_graph=True)
            run.backward(cross_entropy(logits, batch.labels))
            run.step(optimizer)
    except UsageError as error:
        return f"{run.progress.step}: {error}"
    return "nothing"


def test_gradients_of_a_backward_beside_the_runs_are_refused_on_several_workers(tmp_path: Path) -> None:
    for told in run_in_processes(2, with_a_backward_of_its_own, str(tmp_path)):
        assert told.startswith("0: The loop calls loss.backward() itself")
    assert with_a_backward_of_its_own(str(tmp_path / "one")) == "nothing"


def leaves_a_layer_out_of_a_part(folder: str) -> list[Tensor]:
    run = make_run(dataclasses.replace(OPTIONS, batch_size=8, accumulate=2), images(NUM_IMAGES), folder, Recorder())
    model = run.prepare(TwoPaths(run.num_classes))
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches(evaluate=dict):
        for model.step, part in enumerate(run.parts(batch)):
            run.backward(cross_entropy(model(part.images)["logits"], part.labels))
        run.step(optimizer)
    return [each.detach() for each in model.parameters()]


def test_a_layer_that_only_a_part_of_a_batch_uses_trains_as_on_one_worker(tmp_path: Path) -> None:
    one = leaves_a_layer_out_of_a_part(str(tmp_path / "one"))
    for two in run_in_processes(2, leaves_a_layer_out_of_a_part, str(tmp_path / "two")):
        torch.testing.assert_close(two, one, rtol=1e-8, atol=1e-8)


def does_nothing(run: Run) -> None:
    run.prepare(run.build_model())


def test_a_loop_without_a_step_is_refused(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    for loop in (does_nothing, steps_of):  # which yields
        loop(run)
        with pytest.raises(UsageError, match=r"returned without a step; it goes over run.batches\(\)"):
            run.finish()


def wraps_a_prepared_network(run: Run) -> None:
    model = run.prepare(run.build_model())
    train_in(run, model, nn.parallel.DistributedDataParallel(model))


def prepares_a_wrapper(run: Run) -> None:
    model = run.prepare(nn.parallel.DistributedDataParallel(run.build_model()))
    train_in(run, model, model)


def wraps_a_layer(run: Run) -> None:
    model: Any = run.prepare(run.build_model())
    model[0] = nn.parallel.DistributedDataParallel(model[0])
    train_in(run, model, model)


def wraps_before(run: Run) -> None:
    model = run.build_model()
    wrapper = nn.DataParallel(model)
    train_in(run, run.prepare(model), wrapper)


def train_in(run: Run, model: nn.Module, called: nn.Module) -> None:
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches():
        run.backward(cross_entropy(called(batch.images), batch.labels))
        run.step(optimizer)


WRAPS = (wraps_a_prepared_network, prepares_a_wrapper, wraps_a_layer, wraps_before)


def refusals(folder: str) -> list[str]:
    told = []
    for loop in WRAPS:
        with pytest.raises(UsageError) as error:
            loop(make_run(OPTIONS, images(NUM_IMAGES), f"{folder}/{loop.__name__}", Recorder()))
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_joins_gradients_itself_is_refused_around_a_network_or_in_it(num_workers: int, tmp_path: Path) -> None:
    for told in run_in_processes(num_workers, refusals, str(tmp_path)):
        wrappers = ("DistributedDataParallel",) * 3 + ("DataParallel",)
        for text, wrapper in zip(told, wrappers, strict=True):
            assert text.startswith(f"The loop puts a network of run.prepare, or a layer of one, into a {wrapper},")


def test_a_loop_that_prepares_other_objects_than_its_checkpoint_has_is_refused(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder(stop_after=2))
    to_the_end(run)
    run.finish()
    for loop, sentence in (
        (several_models, "The checkpoint holds no model-2"),
        (no_optimizer, "holds optimizer, which this loop does not"),
    ):
        with pytest.raises(UsageError, match=sentence):
            loop(make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder()))


def test_every_checkpoint_is_an_event(tmp_path: Path) -> None:
    recorder = Recorder()
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), recorder)
    to_the_end(run)
    run.finish()
    assert recorder.events == [CheckpointWritten(f"checkpoints/step-{step:09d}.pt", step) for step in (6, 12)]


def no_optimizer(run: Run) -> None:
    run.prepare(run.build_model())
    next(iter(run.batches()))
