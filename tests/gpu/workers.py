"""What happens beside a GPU's steps: transforms of the user's own in processes, and gradients between two workers."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torchvision.transforms import v2

import raytrain
from tests.gpu.photographs import Watch
from tests.gpu.trial import Trial
from tests.helpers.photographs import write_photographs


def transforms() -> Any:
    """A usual recipe of torchvision's, image by image."""
    return [v2.RandAugment(), v2.ColorJitter(0.4, 0.4, 0.4)]


def own_transforms(trial: Trial) -> None:
    """Photographs in memory, whose transforms run image by image in processes beside the worker, and without them."""
    write_photographs(trial.folder / "photographs", trial.scaled(1024, on_cpu=60))
    for name, chosen in {"none": None, "RandAugment and jitter": "tests.gpu.workers:transforms"}.items():
        watch = Watch(trial)
        cached: dict[str, Any] = {"cache": "memory", "random_resized_crop": True, "cache_side": 1.0}
        raytrain.train(_options(trial, f"transforms-{bool(chosen)}", transforms=chosen, **cached), view=watch)
        uses = list(watch.uses.values())[1:]  # while the first was measured, images were decoded
        trial.figure(f"own transforms: {name}", "images/s", *(use.images_per_s for use in uses))
        waits = [use.data_wait_fraction for use in uses]
        trial.figure(f"own transforms: {name}: the loop waits for images", "of 1", *waits)


def gradient_dtype(trial: Trial) -> None:
    """Two workers on two GPUs, whose gradients travel in float32 and in bfloat16."""
    num_gpus = torch.cuda.device_count() if trial.on_gpu else 2
    if num_gpus < 2:
        trial.says("gradients travel between GPUs, and this machine has one")
        return
    write_photographs(trial.folder / "photographs", trial.scaled(1024, on_cpu=60))
    losses: dict[str, float] = {}
    for name, chosen in {"float32": None, "bfloat16": "bfloat16"}.items():
        rows: dict[int, Any] = {}
        options = {"workers": 2, "gradient_dtype": chosen, "cache": "memory", "max_steps": trial.scaled(60, on_cpu=6)}
        raytrain.train(
            _options(trial, f"gradients-{name}", **options),
            view=lambda snapshot, rows=rows: rows.update(
                {row.step: row for row in snapshot.rows if row.kind == "step"}
            ),
        )
        kept = [rows[step] for step in sorted(rows)]
        speeds = [row.images_per_s for row in kept[len(kept) // 2 :] if row.images_per_s]
        trial.figure(f"two workers, gradients in {name}", "images/s", *speeds)
        losses[name] = median(row.loss for row in kept if row.loss is not None)
    trial.check("loss with bfloat16 : float32", losses["bfloat16"] / losses["float32"], "×", at_most=1.1)


def _options(trial: Trial, name: str, **options: Any) -> raytrain.TrainConfig:
    base: dict[str, Any] = {
        "data": str(trial.folder / "photographs"),
        "storage": str(trial.folder / "runs"),
        "name": name,
        "model": "resnet50" if trial.on_gpu else "tests.helpers.memory_runs:network",
        "image_size": (224, 224) if trial.on_gpu else (16, 16),
        "batch_size": trial.scaled(256, on_cpu=8),
        "learning_rate": 0.01,
        "epochs": 1000,
        "max_time": f"{trial.scaled(20, on_cpu=12)}s",
        "log_every": 1,
        "evaluate_every": 0,
        "checkpoint_every": (),
        "precision": "bfloat16" if trial.on_gpu else "float32",
        "workers": 1,
        "backend": "local",
        "device": trial.device,
    }
    return raytrain.recipes.custom(**{**base, **options})
