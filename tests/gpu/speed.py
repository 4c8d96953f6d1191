"""How long a step takes: the built-in loop beside a plain one, and each switch with and without it.

Images are in memory, decoded, so that nothing is measured but steps. The host waits for the device before the first
step that counts, and after the last.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from raytrain.config import ResolvedConfig
from raytrain.recipes import custom
from raytrain.training.assembly import train_run
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.networks.device_precision import set_gpu_products
from raytrain.training.networks.model import build_model
from raytrain.training.run import Run
from tests.benchmarks.step import NUM_CLASSES, Images, Labels, run_in_memory
from tests.benchmarks.switches import train_unfused
from tests.gpu.trial import Trial

_MEAN, _STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
_LEAST_OF_PLAIN = 0.95


@dataclass(frozen=True)
class Work:
    """A network with its images, and the steps that count."""

    name: str
    model: str
    side: int
    batch_size: int
    num_steps: int

    def config(self, trial: Trial, **options: Any) -> ResolvedConfig:
        base: dict[str, Any] = {
            "model": self.model,
            "image_size": (self.side, self.side),
            "batch_size": self.batch_size,
            "learning_rate": 0.01,
            "epochs": 1000,
            "max_steps": _warm_up(trial) + self.num_steps,
            "precision": "bfloat16" if trial.on_gpu else "float32",
            "channels_last": True,
            "flip": "random",
            "evaluate_every": 0,
            "checkpoint_every": (),
            "device": trial.device,
        }
        asked = custom(**{**base, **options})
        return asked.resolve(name="speed", num_workers=1, device=trial.device, mean=_MEAN, std=_STD)

    def data(self) -> tuple[Images, Labels]:
        random = np.random.default_rng(0)
        num_images = max(4 * self.batch_size, 512)
        images = random.integers(0, 256, (num_images, self.side, self.side, 3), dtype=np.uint8)
        return images, random.integers(0, NUM_CLASSES, num_images)


def _works(trial: Trial) -> tuple[Work, Work]:
    if not trial.on_gpu:
        small = Work("cifar10's network", "raytrain.models:cifar10", 32, 16, 3)
        return small, Work("ResNet-18 at 32x32", "resnet18", 32, 8, 2)
    small = Work("cifar10's network, 1,024 images of 32x32", "raytrain.models:cifar10", 32, 1024, 60)
    return small, Work("ResNet-50, 256 images of 224x224", "resnet50", 224, 256, 20)


def _warm_up(trial: Trial) -> int:
    """Steps that do not count, in which kernels are chosen."""
    return trial.scaled(8, on_cpu=2)


class Clock:
    """The seconds from the end of the warm-up to the end of the last step, by the optimizer's steps."""

    def __init__(self, trial: Trial, num_steps: int) -> None:
        self._trial, self._first, self._count = trial, _warm_up(trial), 0
        self._last = self._first + num_steps
        self._num_steps = num_steps
        self._since = self.first_step_s = self.step_s = time.perf_counter()

    @contextmanager
    def runs(self) -> Iterator[Clock]:
        self._since = time.perf_counter()
        hook = register_optimizer_step_post_hook(lambda *_: self._tick())
        try:
            yield self
        finally:
            hook.remove()

    def _tick(self) -> None:
        self._count += 1
        if self._count in (1, self._first, self._last):
            self._trial.synchronise()
            if self._count == self._first:  # or a search through all that a compiler has left would be measured, too
                gc.collect()
                gc.freeze()
            seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
            if self._count == 1:
                self.first_step_s = seconds
            elif self._count == self._last:
                self.step_s = seconds / self._num_steps


@dataclass(frozen=True)
class Bench:
    """A network's work on a device, and its images in memory."""

    trial: Trial
    work: Work
    images: Images
    labels: Labels

    @classmethod
    def of(cls, trial: Trial, work: Work) -> Bench:
        return cls(trial, work, *work.data())

    def through_raytrain(self, loop: Callable[[Run], None] | None = None, **options: Any) -> Clock:
        folder = str(self.trial.folder / f"{time.monotonic_ns()}")
        spec, run = run_in_memory(self.work.config(self.trial, **options), self.images, self.labels, folder, loop)
        run.evaluation = lambda run: {}  # the last step ends with one
        with Clock(self.trial, self.work.num_steps).runs() as clock:
            train_run(spec, run)
        return clock

    def plainly(self, *, kept: bool) -> Clock:
        """A plain loop with raytrain's augmentation, so that both compute the same; images may be on the device."""
        config, device = self.work.config(self.trial), torch.device(self.trial.device)
        set_gpu_products(config.precision)
        torch.backends.cudnn.benchmark = True
        augment = Augment(config)
        pixels, truth = (torch.from_numpy(each) for each in (self.images, self.labels))
        pixels, truth = (pixels.to(device), truth.to(device)) if kept else (pixels, truth)
        model = build_model(config.model, NUM_CLASSES, 3, 0).to(device)
        model.to(memory_format=torch.channels_last)  # pyright: ignore
        optimizer = torch.optim.SGD(model.parameters(), config.learning_rate, momentum=config.momentum, fused=True)
        with Clock(self.trial, self.work.num_steps).runs() as clock:
            for _ in range(_warm_up(self.trial) + self.work.num_steps):
                samples = torch.randint(len(pixels), (self.work.batch_size,))
                batch, targets = _batch(pixels, truth, samples, device)
                inputs = augment.train(batch, samples.numpy(), 0)
                with torch.autocast(device.type, torch.bfloat16, enabled=self.trial.on_gpu):
                    logits = model(inputs)
                loss = F.cross_entropy(logits.float(), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return clock


def _batch(pixels: Tensor, truth: Tensor, samples: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    if pixels.device.type == device.type:
        chosen = samples.to(device, non_blocking=True)
        return pixels[chosen], truth[chosen]
    batch, targets = pixels[samples].pin_memory(), truth[samples].pin_memory()
    return batch.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def beside_a_plain_loop(trial: Trial) -> None:
    for work in _works(trial):
        bench = Bench.of(trial, work)
        sides: dict[str, Callable[[], Clock]] = {
            "plain loop, images on the device": partial(bench.plainly, kept=True),
            "plain loop, images in pinned memory": partial(bench.plainly, kept=False),
            "raytrain": bench.through_raytrain,
        }
        rounds = [{name: side().step_s for name, side in sides.items()} for _ in range(trial.scaled(2, on_cpu=1))]
        best = {name: min(each[name] for each in rounds) for name in sides}
        for name in sides:
            trial.figure(f"{work.name}: {name}", "ms", *(1000 * each[name] for each in rounds))
            trial.figure(f"{work.name}: {name}", "images/s", work.batch_size / best[name])
        for name in list(sides)[:2]:
            least = _LEAST_OF_PLAIN if trial.on_gpu else 0.0
            trial.check(f"{work.name}: speed, raytrain : {name}", best[name] / best["raytrain"], "×", at_least=least)


SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # with it, and without it
    "channels last": ({}, {"channels_last": False}),
    "bfloat16, not float32": ({}, {"precision": "float32"}),
    "tf32, not float32": ({"precision": "tf32"}, {"precision": "float32"}),
    "float16, not bfloat16": ({"precision": "float16"}, {}),
    "fused optimizer": ({}, {"loop": train_unfused}),
    "average of weights": ({"ema_decay": 0.99}, {}),
    "mixup": ({"mixup": 0.2}, {}),
    "batch norm of local batches": ({"batch_norm": "aggregate"}, {}),
    "two microbatches": ({"accumulate": 2}, {}),
    "gradient checkpointing": ({"gradient_checkpointing": True}, {}),  # of networks that have blocks
}


def switches(trial: Trial) -> None:
    """Milliseconds of a step with each switch and without it. Equal options are measured once."""
    for work in _works(trial)[:: -1 if trial.on_gpu else 2]:  # the larger one first: there may be no time for both
        bench, measured = Bench.of(trial, work), dict[str, float]()
        for name, states in SWITCHES.items():
            if name == "gradient checkpointing" and not work.model.startswith("resnet"):
                continue
            for chosen in states:
                if str(chosen) not in measured:
                    measured[str(chosen)] = 1000 * bench.through_raytrain(**chosen).step_s
            trial.figure(f"{work.name}: {name}: with, without", "ms", *(measured[str(chosen)] for chosen in states))


def random_changes(trial: Trial) -> None:
    """What the random changes of images add to a step; RandAugment may take a twentieth of it."""
    changes: dict[str, dict[str, Any]] = {
        "none": {},
        "RandAugment": {"auto_augment": "randaugment"},
        "AugMix": {"auto_augment": "augmix"},
        "jitter, blur, rotation, erasing": {"color_jitter": 0.4, "blur": 0.5, "rotation": 15, "random_erasing": 0.5},
    }
    for work in _works(trial)[::-1]:  # the larger one first
        bench, seconds = Bench.of(trial, work), dict[str, float]()
        for name, options in changes.items():
            seconds[name] = bench.through_raytrain(**options).step_s
            trial.figure(f"{work.name}: {name}", "ms", 1000 * seconds[name])
        least = _LEAST_OF_PLAIN if trial.on_gpu and work.model == "resnet50" else 0.0
        ratio = seconds["none"] / seconds["RandAugment"]
        trial.check(f"{work.name}: speed, RandAugment : none", ratio, "×", at_least=least)


def compiled(trial: Trial) -> None:
    """``--compile`` computes what the network computes, and how fast each mode is, after how long."""
    modes = (False, "default", "reduce-overhead") if trial.on_gpu else (False, "default")
    for work in _works(trial):
        bench = Bench.of(trial, work)
        for mode in modes:
            clock = bench.through_raytrain(compile=mode)
            name = f"{work.name}, --compile {mode}" if mode else f"{work.name}, not compiled"
            trial.figure(f"{name}: a step", "ms", 1000 * clock.step_s)
            trial.figure(f"{name}: until the first step is done", "s", clock.first_step_s)
        model = build_model(work.model, NUM_CLASSES, 3, 0).to(trial.device).eval()
        some = torch.rand(8, 3, work.side, work.side, device=trial.device)
        set_gpu_products("float32")  # the runs have left TF32 on, whose rounding would be most of the difference
        with torch.no_grad():
            plain = model(some)
            model.compile()
            difference = ((model(some) - plain).norm() / plain.norm()).item()
        trial.check(f"{work.name}: relative difference of compiled logits", difference, "", at_most=1e-3)
