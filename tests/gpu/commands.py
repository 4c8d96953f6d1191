"""Whole runs without Ray on this machine's device, as users start them, and what is done with their networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import raytrain
from raytrain.runs.documents import run_store
from raytrain.runs.metrics_history import read_metrics
from tests.gpu.trial import Trial
from tests.helpers.photographs import write_photographs

_PUBLISHED_S = "3.83 s, with torch.compile 3.29 s (Jordan 2024, arXiv:2404.00498), on an A100"
_LEAST_ACCURACY = 0.94


def _options(trial: Trial, **chosen: Any) -> raytrain.TrainConfig:
    base = {
        "data": str(trial.folder / "photographs"),
        "storage": str(trial.folder / "runs"),
        "name": "run",
        "model": "resnet18",
        "image_size": (64, 64),
        "epochs": 2,
        "batch_size": 32,
        "workers": 1,
        "backend": "local",
        "device": trial.device,
        "precision": "float32",  # in which networks are used afterwards
        "log_every": 1,
    }
    return raytrain.recipes.custom(**{**base, **chosen})


def run_and_use(trial: Trial) -> None:
    """Train, stop, resume, evaluate, predict, load and export."""
    write_photographs(trial.folder / "photographs", trial.scaled(400, on_cpu=80))
    stopped = raytrain.train(_options(trial, max_steps=3))
    trial.holds("a run with --max-steps 3 ends after them", (stopped.steps, stopped.status) == (3, "finished"))
    result = raytrain.train(_options(trial, resume=True, epochs=trial.scaled(6, on_cpu=2)))
    trial.holds("it goes on when it is resumed", result.status == "finished" and result.steps > 3)
    trial.figure("start, until the first step is done", "s", *(r.startup_seconds or 0.0 for r in (stopped, result)))
    _use(trial, result)


def _use(trial: Trial, result: raytrain.TrainResult) -> None:
    storage, photographs = str(trial.folder / "runs"), trial.folder / "photographs"
    evaluated = raytrain.evaluate("run", storage=storage)
    best = max(row.accuracy or 0.0 for row in read_metrics(run_store(storage, "run")) if row.kind == "evaluation")
    far = abs((evaluated.accuracy or 0.0) - best)
    trial.check("accuracy of evaluate, from the best of the run", far, "", at_most=1e-6)
    files = sorted(map(str, photographs.rglob("*.jpg")))[:16]
    table = raytrain.predict("run", files, storage=storage).table
    network = raytrain.load("run", storage=storage)
    on_cpu = network.classify(files)
    on_device = network.to(trial.device).classify(files)
    answers = [label for label, _ in on_device]
    trial.holds("predict answers as load on the device", table["label"].to_pylist() == answers)
    trial.holds("load answers on the device as on the CPU", [label for label, _ in on_cpu] == answers)
    scores = np.array([score for _, score in on_cpu]) - [score for _, score in on_device]
    trial.check("its probabilities, from those on the CPU", float(np.abs(scores).max()), "", at_most=0.02)
    for suffix in ("safetensors", "pt2", "onnx") if trial.on_gpu else ("safetensors",):  # others take minutes
        try:
            exported = raytrain.export("run", str(trial.folder / f"network.{suffix}"), storage=storage)
        except raytrain.RaytrainError as error:  # packages for ONNX may be missing
            trial.says(f".{suffix} is left out: {error}")
        else:
            trial.check(f".{suffix}: difference of a logit", exported.largest_difference, "", at_most=1e-2)


def cramped(num_classes: int, channels: int) -> nn.Module:
    """A ResNet-18 in a process that may use 2 GiB of its GPU."""
    from torchvision.models import resnet18

    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.mem_get_info()[1])
    return resnet18(num_classes=num_classes)


def out_of_memory(trial: Trial) -> None:
    """``--accumulate auto`` finds the microbatches that fit into a real GPU's memory."""
    write_photographs(trial.folder / "photographs", 600)
    options: dict[str, Any] = {"model": "tests.gpu.commands:cramped", "image_size": (224, 224), "batch_size": 256}
    result = raytrain.train(_options(trial, accumulate="auto", max_steps=4, **options))
    microbatches = json.loads((trial.folder / "runs" / "run" / "config.json").read_text())["accumulate"]
    trial.holds("the run finishes", result.status == "finished" and result.steps == 4)
    trial.check("microbatches of 256 images of 224x224 in 2 GiB", microbatches, "microbatches", at_least=2)


def profiled(trial: Trial) -> None:
    """``raytrain profile`` sees all phases of a step, also on a GPU."""
    write_photographs(trial.folder / "photographs", trial.scaled(200, on_cpu=80))
    config = _options(trial, model="resnet18", batch_size=trial.scaled(64, on_cpu=16), flip="random", translate=2)
    profile = raytrain.profile(config, output=str(trial.folder / "traces"))
    for name, seconds in profile.phases.items():
        trial.figure(name, "ms", 1000 * seconds)
    used = ("waiting for data", "copy and augmentation", "forward", "backward", "optimizer")
    trial.holds("each phase of one worker takes time", all(profile.phases[name] > 0 for name in used))
    trial.holds("forward and backward are less than all", profile.phases["other"] < profile.step_s / 2)
    trial.says(profile.advice)
    trial.holds("there is a trace", Path(profile.traces[0]).stat().st_size > 0)


def fast(trial: Trial) -> None:
    """The recipe ``cifar10-fast``: how long until 94 % of the validation images are right."""
    assert trial.cifar is not None
    places = {"data": str(trial.cifar / "train"), "test_data": str(trial.cifar / "test")}
    storage = str(trial.folder / "runs")
    config = raytrain.recipes.cifar10_fast(
        **places,
        storage=storage,
        name="fast",
        workers=1,
        backend="local",
        device=trial.device,
        cache="memory",
        log_every=5,
        epochs=trial.scaled(16, on_cpu=1),
        max_steps=None if trial.on_gpu else 6,
    )
    result = raytrain.train(config)
    start = result.startup_seconds or 0.0
    # A view of the run would see every second epoch, or fewer, on a fast GPU; the history has all of them.
    rows = [row for row in read_metrics(run_store(storage, "fast")) if row.kind == "evaluation"]
    ends = [row.elapsed_s - start for row in rows]
    reached = [end for row, end in zip(rows, ends, strict=True) if (row.accuracy or 0) >= _LEAST_ACCURACY]
    trial.figure("from the first step to the end, with the decoding of all images", "s", result.seconds - start)
    trial.figure(f"until {_LEAST_ACCURACY:.0%} of the validation images were right", "s", *reached[:1])
    trial.figure("the first epoch, in which they are decoded, and each later one", "s", *np.diff([0.0, *ends]))
    trial.says(f"airbench94, from its first step to its end, on decoded images: {_PUBLISHED_S}")
    if trial.on_gpu:
        trial.check("accuracy", result.validation_accuracy or 0.0, "of 1", at_least=_LEAST_ACCURACY)
