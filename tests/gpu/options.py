"""What only a GPU has, or does in its own way: precisions, the scale of float16's losses, waits of the host, copies."""

from __future__ import annotations

import itertools
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.batch import Batch
from raytrain.training.batches.device_batches import HostTensors, to_batch
from raytrain.training.run import Run
from tests.gpu.trial import Trial
from tests.helpers.memory_runs import Recorder, config, images, make_run, trained

_PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16")
_NETWORK = "tests.gpu.same:network"
_NO_MORE: dict[str, Any] = {"evaluate_every": 0, "checkpoint_every": ()}


def precisions(trial: Trial) -> None:
    """Each precision learns, keeps its weights in the type that it promises, and starts where float64 does."""
    wide, small = ("raytrain.models:cifar10", 0.01, 32), ("tests.helpers.memory_runs:network", 0.05, 12)
    model, rate, num_steps = wide if trial.on_gpu else small
    firsts: dict[str, float] = {}
    for precision, channels_last in itertools.product(_PRECISIONS, (False, True)):
        chosen: dict[str, Any] = {"channels_last": channels_last, "image_size": (32, 32), "learning_rate": rate}
        options = _options(trial, precision=precision, model=model, batch_size=32, max_steps=num_steps, **chosen)
        recorder = Recorder()
        run = make_run(options, images(128), f"{trial.folder}/{precision}-{channels_last}", recorder)
        trained(run)
        losses = [row.loss or math.nan for row in recorder.rows if row.kind == "step"]
        name = f"{precision}{', channels last' if channels_last else ''}"
        trial.check(f"{name}: last losses in terms of the first", np.mean(losses[-4:]) / losses[0], "×", at_most=0.8)
        firsts.setdefault("float64", losses[0])
        far = abs(losses[0] - firsts["float64"]) / firsts["float64"]
        trial.check(f"{name}: how far the first loss is from float64's", far, "×", at_most=_far(precision))
        weight = next(run.models.trained[0].parameters())
        wanted = torch.float64 if precision == "float64" else torch.float32
        trial.holds(f"{name}: weights are {wanted}", weight.dtype == wanted and bool(weight.isfinite().all()))


def _far(precision: str) -> float:
    return {"float64": 1e-9, "float32": 1e-4, "tf32": 5e-3, "bfloat16": 5e-2, "float16": 5e-2}[precision]


def _options(trial: Trial, **chosen: Any) -> ResolvedConfig:
    return config(**{**_NO_MORE, "device": trial.device, "epochs": 1000, "flip": "none", "translate": 0, **chosen})


def loss_scale(trial: Trial) -> None:
    """A step whose gradients are infinite changes no weight, and halves the scale, with a fused optimizer or not."""
    for optimizer, clip_norm in (("sgd", None), ("adamw", 1.0), ("lion", None)):
        chosen: dict[str, Any] = {"precision": "float16", "model": _NETWORK, "clip_norm": clip_norm}
        options = _options(trial, optimizer=optimizer, learning_rate=0.01, max_steps=12, **chosen)
        run = make_run(options, images(64), f"{trial.folder}/{optimizer}", Recorder())
        moved, scales = _train_over_an_overflow(run, step=6)
        trial.holds(f"{optimizer}: weights stay in a step that overflows", not moved[6])
        trial.holds(f"{optimizer}: weights change in the steps after it", all(moved[8:]))
        trial.check(f"{optimizer}: scale after it in terms of that before", scales[7] / scales[6], "×", at_most=0.5)


def _train_over_an_overflow(run: Run, step: int) -> tuple[list[bool], list[float]]:
    """For each step, whether it changed the weights, and the scale of the loss in it."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    scaler = run.prepare(torch.amp.GradScaler(run.device.type))  # pyright: ignore[reportPrivateImportUsage]
    moved, scales = [], []
    for epoch in run.epochs():
        for batch in epoch:
            before = [each.detach().clone() for each in model.parameters()]
            loss = run.loss(model(batch.images), batch.targets)
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
            scaler.scale(loss * (math.inf if batch.step == step else 1.0)).backward()
            scaler.unscale_(optimizer)
            if run.config.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.config.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            run.log(loss=loss)
            moved.append(any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)))
    return moved, scales


WAITING: dict[str, tuple[dict[str, Any], float]] = {  # options, and how often the host may wait in a step
    "the default": ({"precision": "bfloat16"}, 0),
    "flips and shifts": ({"flip": "random", "translate": 2}, 0),
    "random crops": ({"random_resized_crop": True, "cache_side": 1.5}, 0),
    "mixup and CutMix": ({"mixup": 0.2, "cutmix": 1.0}, 0),
    "batch norm of local batches": ({"batch_norm": "aggregate"}, 0),
    "microbatches": ({"accumulate": 2}, 0),
    "average and clipping": ({"ema_decay": 0.9, "clip_norm": 1.0}, 0),
    "float16": ({"precision": "float16"}, 0),
    "float16, lion": ({"precision": "float16", "optimizer": "lion", "learning_rate": 0.001}, 1),
    "gradient checkpointing": ({"gradient_checkpointing": True}, 0),
}


def waits(trial: Trial) -> None:
    """Where the host waits for the GPU in a step, by torch's own count, and in an evaluation."""
    for name, (chosen, limit) in WAITING.items():
        options = _options(trial, model=_NETWORK, max_steps=_LAST + 1, **{"precision": "float32", **chosen})
        run = make_run(options, images(64), f"{trial.folder}/{name}", Recorder())
        places = _places_of_waits(partial(_train_watched, run))
        trial.check(f"{name}: waits in a step", places.total() / (_LAST - _FIRST), "", at_most=limit)
        for place, number in places.items():
            trial.says(f"{name}: {number} waits in {_LAST - _FIRST} steps at {place}")
    # A run that has ended measures nothing any more. The first evaluation of another one sets up what stays.
    run = make_run(_options(trial, model=_NETWORK, precision="float32"), images(64), f"{trial.folder}/new", Recorder())
    run.prepare(run.build_model())
    run.evaluate()
    places = _places_of_waits(lambda: (_warn_of_waits(True), run.evaluate()))
    trial.check("an evaluation of 11 batches: waits, all at its end", places.total(), "", at_most=12)
    for place, number in places.items():
        trial.says(f"evaluation: {number} waits at {place}")


_FIRST, _LAST = 4, 12


def _train_watched(run: Run) -> None:
    """torch warns of waits between two steps: the first ones set up what stays, and the last one ends the run."""
    prepare = run.batches.prepare

    def prepare_watched(local: LocalBatch, tensors: HostTensors) -> Batch:
        _warn_of_waits(_FIRST <= local.batch.step < _LAST)
        return prepare(local, tensors)

    run.batches.prepare = prepare_watched  # for this run only
    trained(run)


def _warn_of_waits(warns: bool) -> None:
    if torch.cuda.is_available():  # this part is tried out on the CPU, too, where nothing waits
        torch.cuda.set_sync_debug_mode("warn" if warns else "default")


def _places_of_waits(action: Callable[[], object]) -> Counter[str]:
    places: Counter[str] = Counter()

    def note(message: Any, *rest: Any, **options: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            frames = [frame for frame in traceback.extract_stack() if "/raytrain/" in frame.filename]
            places[f"{frames[-1].filename.rpartition('/raytrain/')[2]}:{frames[-1].lineno}" if frames else "?"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            action()
        finally:
            _warn_of_waits(False)
    return places


def copies(trial: Trial) -> None:
    """Images arrive whole while the device computes, and their copies take place beside that."""
    side, num_images = trial.scaled(224, on_cpu=32), trial.scaled(256, on_cpu=16)
    options = _options(trial, precision="float32", image_size=(side, side))
    augment, device = Augment(options), torch.device(trial.device)
    locals_ = [_local(number, num_images, side) for number in range(trial.scaled(8, on_cpu=2))]
    expected = [augment.evaluate(torch.from_numpy(local.images)) for local in locals_]
    matrix = torch.rand(trial.scaled(6144, on_cpu=128), trial.scaled(6144, on_cpu=128), device=device)
    arrived: list[Tensor] = []
    for number in range(3 * len(locals_)):
        _ = matrix @ matrix  # what is copied next must not be written over what is read still
        batch = to_batch(locals_[number % len(locals_)], augment, device, training=True)
        arrived = [*arrived[-3:], batch.images.mean(dim=(1, 2, 3))]
        if number % len(locals_) == len(locals_) - 1:
            difference = (batch.images.cpu() - expected[number % len(locals_)]).abs().max().item()
            trial.check(f"batch {number}: difference from the same on the CPU", difference, "", at_most=1e-4)
    _time_copies(trial, locals_, augment, matrix)


def _time_copies(trial: Trial, locals_: list[LocalBatch], augment: Augment, matrix: Tensor) -> None:
    device = torch.device(trial.device)

    def seconds(*, copies: bool, computes: bool) -> float:
        trial.synchronise()
        started = time.perf_counter()
        for local in locals_:
            if computes:
                for _ in range(4):
                    _ = matrix @ matrix
            if copies:
                to_batch(local, augment, device, training=True)
        trial.synchronise()
        return (time.perf_counter() - started) / len(locals_)

    for copying, computing in ((True, True), (True, False), (False, True)):  # the first is a warm-up, too
        seconds(copies=copying, computes=computing)
    both, copying, computing = (
        seconds(copies=copies, computes=computes) for copies, computes in ((True, True), (True, False), (False, True))
    )
    for name, value in (("copies and computing", both), ("copies alone", copying), ("computing alone", computing)):
        trial.figure(f"a batch of {len(locals_[0].labels)}: {name}", "ms", 1000 * value)
    if trial.on_gpu:
        hidden = (copying + computing - both) / min(copying, computing)
        trial.check("copies that computing hides", hidden, "of 1", at_least=0.5)


def _local(number: int, num_images: int, side: int) -> LocalBatch:
    random = np.random.default_rng(number)
    pixels = random.integers(0, 256, (num_images, side, side, 3), dtype=np.uint8)
    numbers, plan = np.arange(num_images), BatchPlan(num_images, num_images, epochs=1, seed=0)
    return LocalBatch(plan.batch(0), pixels, numbers, numbers, numbers, (num_images,))
