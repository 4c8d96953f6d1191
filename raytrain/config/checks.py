"""Options that do not fit together, and values that no annotation can exclude."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from raytrain.config.image_size import DEFAULT, check_image_size, first_and_full_size
from raytrain.errors import UsageError, flag

if TYPE_CHECKING:
    from raytrain.config.options import TrainConfig


def check_combinations(config: TrainConfig) -> None:
    """Raise UsageError with the first reason why no run can start with these options."""
    check_given(config, "batch_size", "batch_size_per_worker")
    _check_workers(config)
    _check_loads(config)
    _check_gpus(config)
    _check_accelerator_type(config)
    _check_crops(config)
    _check_flips(config)
    _check_nesterov(config)
    _check_early_stop(config)
    _check_labels(config)
    _check_multi_label(config)
    _check_backend(config)
    _check_channels(config)


def check_given(config: TrainConfig, total: str, per_worker: str) -> None:
    """Raise UsageError if neither of two options is given: ``total``, and the one that is multiplied by the workers."""
    if getattr(config, total) is None and getattr(config, per_worker) is None:
        raise UsageError(f"Give either {flag(total)} or {flag(per_worker)}; neither is given.")


def _check_workers(config: TrainConfig) -> None:
    if isinstance(config.workers, str) and config.workers != "auto" and not re.fullmatch(r"\d+\.\.\d+", config.workers):
        raise UsageError(f"--workers is {config.workers!r}; give a number, auto, or a range such as 1..4.")
    if config.elastic_workers is None:
        return
    fewest, most = config.elastic_workers
    if not 1 <= fewest <= most:
        raise UsageError(
            f"--workers is {config.workers}; a range starts at 1 or more and must not end below its start."
        )
    if config.worker_load is not None:
        raise UsageError(
            f"--worker-load needs a fixed number of --workers, which is {config.workers}; omit one of them."
        )


def _check_loads(config: TrainConfig) -> None:
    loads = config.worker_load
    if loads is not None and sum(loads) <= 0:
        raise UsageError(f"--worker-load is {loads}; at least one number must be above 0.")


def _check_early_stop(config: TrainConfig) -> None:
    if config.until is not None and not re.fullmatch(r"\w+=\d*\.?\d+", config.until):
        raise UsageError(f"--until is {config.until!r}; give a metric and a number, such as accuracy=0.95.")
    if config.max_time is not None and not re.fullmatch(r"\d*\.?\d+[smhd]", config.max_time):
        raise UsageError(f"--max-time is {config.max_time!r}; give a number and s, m, h or d, such as 90s or 2h.")
    if (config.until or config.patience) and not config.evaluate_every:
        raise UsageError("--until and --patience look at evaluations, of which --evaluate-every 0 makes none.")


def _check_crops(config: TrainConfig) -> None:
    if config.cache_side is not None and not config.random_resized_crop:
        raise UsageError(
            f"--cache-side is {config.cache_side:g}, and only random crops use it; add --random-resized-crop, or omit "
            "--cache-side."
        )
    if config.cache == "memory" and config.crops_originals:
        raise UsageError(
            "--cache is memory, and --random-resized-crop reads the original images in every epoch; add --cache-side "
            "1.15 to cut the crops from images in memory, or omit --cache memory."
        )
    check_image_size(config.image_size, config.epochs)
    height, width = first_and_full_size(config.image_size or DEFAULT)[0]
    if config.image_size is not None and config.translate >= min(height, width):
        raise UsageError(
            f"--translate is {config.translate}, and images have {height}x{width} pixels; it must be less than each "
            "side."
        )


def _check_flips(config: TrainConfig) -> None:
    if config.horizontal_flip and config.alternating_flip:
        raise UsageError(
            "--horizontal-flip draws anew in each epoch which images are mirrored, and --alternating-flip mirrors them "
            "in turn; omit one of them (--no-horizontal-flip if the recipe has it)."
        )


def _check_nesterov(config: TrainConfig) -> None:
    if config.nesterov and (config.optimizer != "sgd" or config.momentum == 0):
        raise UsageError(
            f"--nesterov is for SGD with momentum, and --optimizer is {config.optimizer} with --momentum "
            f"{config.momentum:g}; omit it."
        )


def _check_gpus(config: TrainConfig) -> None:
    numbers = [] if config.gpus is None else config.gpus.split(",")
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--gpus is {config.gpus!r}; give numbers of GPUs separated by commas, each once, such as 0,2."
        )


def _check_accelerator_type(config: TrainConfig) -> None:
    if config.accelerator_type is not None and config.device == "cpu":
        raise UsageError(f"--accelerator-type is {config.accelerator_type}, and --device is cpu; omit one of them.")


def _check_labels(config: TrainConfig) -> None:
    for name in ("key_column", "label_column", "label_separator", "group_by"):
        if getattr(config, name) not in (None, ()) and config.labels is None:
            raise UsageError(f"{flag(name)} is for the label file; give that with --labels.")
    if config.label_separator is not None and len(config.label_column) > 1:
        raise UsageError(
            "--label-separator is for one column with several classes; name one --label-column, or omit it."
        )
    if config.label_separator == "":
        raise UsageError("--label-separator is empty; give the text between two classes, such as |.")


def _check_multi_label(config: TrainConfig) -> None:
    if not config.multi_label:
        return
    unfit = {
        "--sampling balanced": config.sampling == "balanced",
        "--focal-gamma": config.focal_gamma > 0,
        "--label-smoothing": config.label_smoothing > 0,
    }
    for option, is_given in unfit.items():
        if is_given:
            raise UsageError(f"{option} needs images of one class each, and here an image may have several; omit it.")


def _check_backend(config: TrainConfig) -> None:
    if config.backend != "local":
        return
    if config.elastic_workers is not None:
        raise UsageError(
            f"--workers is {config.workers}, and only --backend ray trains on workers that come and go; give a number."
        )
    if config.address is not None:
        raise UsageError(f"--address is {config.address}, and --backend local trains without Ray; omit one of them.")
    if config.scope_keys:
        raise UsageError("--scope-keys limits what a Ray cluster is lent; with --backend local, leave it out.")
    if config.wait_for_machines_s:
        raise UsageError("--wait-for-machines-s is for a Ray cluster with an autoscaler; omit it with --backend local.")
    if config.accelerator_type is not None:
        raise UsageError("--accelerator-type chooses among the machines of a Ray cluster; on one, use --gpus.")


def _check_channels(config: TrainConfig) -> None:
    for name in ("mean", "std"):
        value = getattr(config, name)
        if value is not None and len(value) != config.channels:
            raise UsageError(
                f"{flag(name)} has {len(value)} numbers for {config.channels} channels; give one number per channel."
            )
