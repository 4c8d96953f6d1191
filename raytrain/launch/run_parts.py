"""Parts of a run that its options name: the loop, the transforms, the initial weights, and the spec of them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.launch.prepare import Loop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from raytrain.data.dataset import Dataset
    from raytrain.storage.store import Store
    from raytrain.training.augment import Transforms
    from raytrain.training.run_spec import RunSpec


def load_loop(config: TrainConfig, loop: Loop | None) -> Loop | None:
    """The training loop to use: ``loop``, or else the one that ``--loop`` names; None for the built-in one."""
    if loop is not None or config.loop is None:
        return loop
    from raytrain.config.user_function import load_function

    return load_function("--loop", config.loop)


def load_transforms(config: TrainConfig) -> Callable[[], Transforms] | None:
    """The function that ``--transforms`` names."""
    if config.transforms is None:
        return None
    from raytrain.config.user_function import load_function

    return load_function("--transforms", config.transforms)


def run_spec(config: ResolvedConfig, data: Dataset, store: Store, loop: Loop | None, num_workers: int) -> RunSpec:
    """The one way to put a run together, whoever trains it. ``num_workers`` only sizes the batches of evaluations."""
    from raytrain.data.dataset import class_weights
    from raytrain.training.run_spec import RunSpec

    return RunSpec(
        config=config,
        loop=loop,
        transforms=load_transforms(config),
        classes=data.train.classes,
        manifest_digest=data.train.digest,
        plan=data.plan(config),
        test_plan=data.test_plan(num_workers),
        store=store,
        class_weights=class_weights(config.class_weights, data.train),
        label_sets=data.train.label_sets,
    )


def load_initial_weights(spec: RunSpec, first_step: int) -> Mapping[str, Tensor] | None:
    """The weights that ``--weights`` names, read once for all workers; None if the seed or a checkpoint decides.

    Raises UsageError if the network, its weights or what is asked of its layers do not fit: the network is built here
    for that alone.
    """
    from raytrain.training import transfer
    from raytrain.training.model import check_growing_size
    from raytrain.training.optimisation import parameter_groups
    from raytrain.training.prepared_models import checkpoint_gradients

    config, num_classes = spec.config, len(spec.classes)
    weights = transfer.initial_weights(config, spec.classes, first_step)
    model = transfer.initial_model(config, num_classes, weights)
    if spec.loop is None:  # a loop of the user's may train another network
        check_growing_size(model, config)
        transfer.freeze(model, config.freeze, num_classes)
        parameter_groups(config, model, num_classes)  # no optimizer, which would import torch._dynamo: seconds
        if config.gradient_checkpointing:
            checkpoint_gradients(model)
    return weights
