"""A step on a GPU, with tensors that are on one in name only: all stay there, and the host waits for none of them.

torch's fake tensors have shapes, types and devices, and no values, so that this needs no GPU. What can't be tried that
way: the backward, cuDNN's LSTM, and transforms of the user's own, which draw their random numbers on the host.
``tests/gpu`` tries them on a GPU. docs/architecture.md lists where the host waits in a step, and why.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain import recipes
from raytrain.config import ResolvedConfig
from raytrain.config.network import first_and_full_size
from raytrain.data.blocks import LocalBatch
from raytrain.recipes import RECIPES
from raytrain.runs.metric_row import MetricRow
from raytrain.training.batches import device_batches
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.augmentation import Augmentation
from raytrain.training.batches.batch import Batch
from raytrain.training.batches.device_batches import HostTensors, on_host
from raytrain.training.batches.mixup import mix_batch
from raytrain.training.exact import dropout
from raytrain.training.metrics import machine_meter, sample_margins, step_metrics
from raytrain.training.metrics.step_metrics import StepMetrics, StepTotals
from raytrain.training.networks.loss import Loss
from raytrain.training.networks.model import build_model
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.protocols import Worker
from raytrain.training.run import Run
from raytrain.training.waiting import wait_for_all
from tests.gpu.same import OPTIONS
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, images, make_run
from tests.helpers.memory_runs import config as small_config

# Those of torch 2.8 look for a driver.
pytestmark = pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="torch 2.8 has no fake GPU without a GPU")
GPU = torch.device("cuda", 0)
OF_UNKNOWN_SIZE = "nonzero", "masked_select", "unique"


class HostWaits(TorchDispatchMode):
    """Notes each operation for which the host waits until a GPU has done all that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._waits(str(func), args, kwargs or {}, result):
            called = [each for each in traceback.extract_stack() if "/raytrain/" in each.filename]
            self.found.append(f"{func} in {called[-1].filename}:{called[-1].lineno}" if called else str(func))
        return result

    def _waits(self, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        devices = [each.device.type for each in args if isinstance(each, Tensor)]
        if name.startswith("aten._to_copy"):
            return devices[0] != result.device.type and not kwargs.get("non_blocking")
        if name.startswith("aten.copy_"):
            return devices[0] != devices[1] and not (kwargs.get("non_blocking") or args[2:] == (True,))
        if name.startswith(("aten.index.", "aten.index_put")):
            indices = [each for each in args[1] if isinstance(each, Tensor)]
            return devices[0] == "cuda" and any(each.dtype == torch.bool or not each.is_cuda for each in indices)
        return "cuda" in devices and ("_local_scalar_dense" in name or any(each in name for each in OF_UNKNOWN_SIZE))


@pytest.fixture(autouse=True)
def _no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.random, "fork_rng", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    # torch would ask a driver for these, and there is none.
    monkeypatch.setattr(machine_meter, "gpu_use", lambda device: {})


@pytest.fixture(autouse=True)
def _modes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a copied network keep its mode: torch copies that, too, with pointers that both then free."""
    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", lambda self, memo: self, raising=False)


@contextlib.contextmanager
def on_a_gpu() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function twice with fake tensors; the second time, the host must wait for nothing."""

    def call(function: Callable[[], Any]) -> Any:
        function()  # what is moved to the GPU once stays there
        with HostWaits() as waits:
            result = function()
        assert waits.found == []
        return result

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield call


def config(**options: Any) -> ResolvedConfig:
    asked = recipes.custom(data="images", model="resnet18", image_size=(32, 32), precision="float32", **options)
    return asked.resolve(name="run", num_workers=1, device="cpu", mean=(0.5,) * 3, std=(0.2,) * 3)


def batch(size: int = 4) -> Batch:
    numbers = torch.zeros(size, dtype=torch.int64, device=GPU)
    return Batch(torch.zeros(size, 3, 32, 32, device=GPU), numbers, numbers, numbers, 0, 0, size, (size,))


@pytest.mark.parametrize(
    "options",
    [
        {"flip": "none", "translate": 0},
        {"flip": "random", "translate": 2},
        {"flip": "alternating", "translate": 2},
        {"random_resized_crop": True, "cache_side": 1.5},
        {"channels_last": True, "flip": "random"},
        {"auto_augment": "randaugment"},
        {"auto_augment": "augmix", "rotation": 5},
        {"color_jitter": 0.3, "blur": 0.5, "random_erasing": 0.5},
    ],
    ids=str,
)
def test_images_are_augmented_where_they_are(options: dict[str, Any]) -> None:
    augment = Augment(config(**options))
    with on_a_gpu() as call:
        images = torch.zeros((4, *augment.source_shape), dtype=torch.uint8, device=GPU)
        trained = call(lambda: augment.train(images, np.arange(4), 0))
        evaluated = call(lambda: augment.evaluate(images))
    assert (trained.device, evaluated.device, trained.shape) == (GPU, GPU, (4, 3, 32, 32))


class Calls(TorchDispatchMode):
    """Counts torch's calls."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += str(func).startswith("aten")  # fake tensors also ask for devices
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_images", [32, 500])
def test_randaugment_of_a_batch_of_any_size_is_at_most_300_calls(num_images: int) -> None:
    augmentation = Augmentation("randaugment")
    with FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
        augmentation(torch.zeros(num_images, 3, 224, 224, dtype=torch.uint8, device=GPU), range(num_images))
    assert calls.num <= 300


def test_an_average_of_weights_takes_two_calls_for_a_network_of_any_size() -> None:
    average = WeightAverage(build_model("resnet18", 10, 3, 0), 0.9)
    with Calls() as calls:
        average.update(step=0)
    assert calls.num == 2


def test_what_a_step_counts_takes_few_kernels() -> None:
    cpu = torch.device("cpu")
    numbers = torch.zeros(4, dtype=torch.int64)
    step = Batch(torch.zeros(4, 3, 8, 8), numbers, numbers, numbers, 0, 0, 4, (4,))
    margins, metrics = sample_margins.SampleMargins(10, 10, Worker(0, 1, cpu)), StepMetrics(Worker(0, 1, cpu), print, 0)
    margins.begin(step)
    metrics.log({"loss": (torch.zeros(()), 4)}, counts=True)
    with Calls() as calls:
        metrics.log({"loss": (torch.zeros(()), 4)}, counts=True)
    assert calls.num <= 6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        margins.add(torch.zeros(4, 10), numbers)
    assert sum(event.name.startswith("aten::") for event in profile.events() or ()) <= 60  # also within others


@pytest.mark.parametrize("options", [{"mixup": 0.2}, {"cutmix": 1.0}], ids=str)
def test_images_are_mixed_where_they_are(options: dict[str, Any]) -> None:
    with on_a_gpu() as call:
        mixed = call(lambda: mix_batch(batch(), 10, 0, **options))
    assert (mixed.images.device, mixed.targets.device) == (GPU, GPU)


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"focal_gamma": 2.0}, {"labels": "labels.csv", "label_separator": "|"}],
    ids=str,
)
@pytest.mark.parametrize("weights", [None, (1.0,) * 10])
def test_the_loss_is_computed_where_the_logits_are(options: dict[str, Any], weights: tuple[float, ...] | None) -> None:
    with on_a_gpu() as call:
        targets = torch.zeros(4, 10, device=GPU) if "labels" in options else batch().targets
        loss = Loss(config(**options), 10, weights, GPU)
        assert call(lambda: loss(torch.zeros(4, 10, device=GPU), targets)).device == GPU


def test_dropout_draws_for_several_views_where_the_images_are() -> None:
    network = dropout.convert(nn.Sequential(nn.Dropout(0.5)))
    with on_a_gpu() as call:
        layers = dropout.begin(network.modules(), batch(4).samples, seed=0, step=0)
        call(lambda: dropout.follow_views(layers, batch(8).images))
        assert call(lambda: network(torch.ones(8, 5, device=GPU))).device == GPU


def test_margins_are_added_up_where_the_logits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_margins, "_is_plain", lambda tensor: True)  # a fake tensor is none
    with on_a_gpu() as call:
        margins, step = sample_margins.SampleMargins(10, 10, Worker(0, 1, GPU)), batch()

        def add() -> None:
            margins.begin(step)
            margins.add(torch.zeros(4, 10, device=GPU), step.labels)

        call(add)


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"custom", "digits-lstm"}))
def test_the_networks_of_the_recipes_stay_on_the_gpu(recipe: str) -> None:
    wanted = RECIPES[recipe](data="images")
    with on_a_gpu() as call:
        with GPU:
            network = build_model(wanted.model, 10, wanted.channels, 0)
        size = first_and_full_size(wanted.image_size or (32, 32))[1]
        images = torch.zeros(4, wanted.channels, *size, device=GPU)
        assert call(lambda: network(images)).device == GPU


class OnItsWay:
    """Numbers on the host, and the event after which they are there: notes when the host waits for it."""

    def __init__(self) -> None:
        self.num_begun, self.waited_for = 0, list[int]()

    def copy(self, sums: Tensor, work: object) -> tuple[Any, Any]:
        number, length = self.num_begun, len(sums)
        self.num_begun += 1
        numbers = SimpleNamespace(tolist=lambda: [1.0] * length)
        return numbers, SimpleNamespace(synchronize=lambda: self.waited_for.append(number))


@pytest.fixture
def on_its_way(monkeypatch: pytest.MonkeyPatch) -> OnItsWay:
    copies = OnItsWay()
    # A GPU in name only has no numbers to copy, and no events that say when they have come.
    monkeypatch.setattr(step_metrics, "copy_to_host", copies.copy)
    return copies


def test_what_a_loop_logs_is_read_a_step_late_unless_a_row_waits_for_it(on_its_way: OnItsWay) -> None:
    with on_a_gpu() as call:
        rows: list[MetricRow] = []
        metrics = StepMetrics(Worker(0, 1, GPU), rows.append, 0)

        def step() -> StepTotals:
            metrics.start(StepTotals(4))
            loss = torch.zeros((), device=GPU)
            metrics.log({"loss": (loss * 4, 4), "recall": (loss, torch.ones((), device=GPU))}, counts=True)
            return metrics.read()

        assert call(step).num_used == 4  # two steps, the second of which reads what the first one began to copy
        assert (on_its_way.num_begun, on_its_way.waited_for) == (2, [0])
        metrics.close_row(2, 0, [0.1])
        step()
        assert (on_its_way.num_begun, on_its_way.waited_for) == (3, [0, 1, 2])
        step()
        assert on_its_way.waited_for == [0, 1, 2]
    assert [row.step for row in rows] == [2] and metrics.samples_seen == 16


def not_pinned(local: LocalBatch, augment: Augment, device: torch.device) -> HostTensors:
    return on_host(local, augment, torch.device("cpu"))


@pytest.fixture
def run_on_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_its_way: OnItsWay) -> Callable[..., Run]:
    """Makes a run whose network is made on the GPU, to which fake weights cannot be moved, and images are copied."""

    def copied(tensors: HostTensors, device: torch.device) -> HostTensors:
        return [each.to(device, non_blocking=True) for each in tensors]

    # Memory is pinned by the driver of a GPU, and there is none.
    monkeypatch.setattr(device_batches, "_to_device", copied)
    monkeypatch.setattr(device_batches, "on_host", not_pinned)
    for method in ("to", "float"):
        monkeypatch.setattr(torch.nn.Module, method, lambda self, *place, **options: self)

    def prepared(**options: Any) -> Run:
        chosen = {"device": "cuda", "precision": "float32", "model": "tests.gpu.same:network", **options}
        run = make_run(small_config(**chosen), images(40), str(tmp_path), Recorder())
        with GPU:
            run.prepare(run.build_model())
        return run

    return prepared


@pytest.mark.not_quick
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_any_option_waits_for_nothing_but_for_the_backward(
    name: str, run_on_gpu: Callable[..., Run], on_its_way: OnItsWay
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = run_on_gpu(**OPTIONS[name], log_every=10)
        batches = ((local, not_pinned(local, run.augment, GPU)) for local in run.batches.source.train(0))
        steps = [HostWaits() for _ in range(3)]
        for waits in steps:
            # epochs() prepares images in another thread, which fakes no GPU: the private generator is given them.
            with waits, contextlib.closing(run._batches(batches, run.plan.num_steps)) as begun:
                batch = next(begun)
                for microbatch in batch.microbatches():
                    logits = run.models.trained[0](microbatch.images)
                    accuracy = run.accuracy(logits, microbatch)
                    run.log(loss=run.loss(logits, microbatch.targets), accuracy=accuracy, rate=0.1)
                    run.show(microbatch, logits)
                run.steps.share()
                before = on_its_way.num_begun
                run.steps.end_batch()
            assert logits.device == batch.images.device == GPU
    assert steps[-1].found == []
    # In the third step, what was logged before it is not there yet, and nobody waits for it.
    assert on_its_way.num_begun == before and before - 1 not in on_its_way.waited_for


@pytest.mark.parametrize("views", [(), ("flip", "shift")])
def test_an_evaluation_waits_once_at_its_end(
    views: tuple[str, ...], run_on_gpu: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = run_on_gpu(test_views=views, ema_decay=0.9)
        monkeypatch.setattr(run, "total", lambda sums: [1.0] * len(sums))
        monkeypatch.setattr(run.steps, "record_evaluation", lambda measured, thresholds: 1)
        monkeypatch.setattr(run.gallery, "write", lambda *place: None)
        monkeypatch.setattr(run.margins, "lowest", lambda most: ())
        run.evaluate()
        with HostWaits() as waits:
            run.evaluate()
    assert waits.found == []


def warnings_of_a_barrier_on_gpus() -> list[str]:
    """Return torch's warnings of a barrier in a process group that takes itself for one of GPUs."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        patch.setattr(torch._C, "_get_accelerator", lambda: GPU)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(dist, "get_backend", lambda: "nccl")
        patch.setattr(dist.distributed_c10d, "_get_object_coll_device", lambda group: "cuda")
        patch.setattr(dist.ProcessGroup, "barrier", lambda group, opts: None)
        wait_for_all()
    return [str(each.message) for each in found]


@pytest.mark.not_quick
def test_torch_does_not_warn_of_the_barrier_at_the_end_of_a_run() -> None:
    assert run_in_processes(1, warnings_of_a_barrier_on_gpus) == [[]]
