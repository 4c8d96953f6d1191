"""Out of memory: finds by trial into how many microbatches a global batch must be divided, and reports it.

With ``--accumulate auto``, each worker tries before the first step whether a step of its images fits into its memory:
at once, in two microbatches, in four, and so on. All workers use the largest number that any of them needs. If memory
runs out later, the run ends with the number of microbatches to try next, and is started again with that.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import torch
import torch.distributed as dist

from raytrain.config.user_code import lacks_memory
from raytrain.data.plan.partition import Partition
from raytrain.errors import OutOfMemory, RaytrainError, UsageError
from raytrain.training.networks.mixed_precision import mixed_precision
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.optimisation import build_optimizer
from raytrain.training.prepared_models import apply_options
from raytrain.training.run import Run


def check_step_fits(run: Run) -> None:
    """Try whether a step fits into every worker's memory. Every worker calls this.

    Raises OutOfMemory on all workers if it needs more microbatches than the plan has, UsageError if not one image fits.
    """
    # Find the fewest microbatches, a power of two, in which this worker can compute its images. If no number suffices,
    # the search ends above the number of images in a batch.
    num_microbatches = 1
    while num_microbatches < 2 * run.plan.batch_size and not _fits(run, num_microbatches):
        num_microbatches *= 2

    # Every worker takes as many as the one that needs most.
    most_microbatches = torch.tensor(num_microbatches, device=run.device)
    if run.world_size > 1:
        dist.all_reduce(most_microbatches, dist.ReduceOp.MAX)
    if most_microbatches > run.plan.accumulate:
        raise _out_of_memory(run, int(most_microbatches))


def _fits(run: Run, num_microbatches: int) -> bool:
    """Return whether a step with the largest of ``num_microbatches`` fits into this worker's memory, by trying one."""
    plan = replace(run.plan, accumulate=num_microbatches)
    partition = Partition(plan, run.rank, run.config.loads(run.world_size))
    num_images = max(1, *partition.microbatch_sizes(plan.batch(0)))  # a worker without images has a placeholder
    fits = True
    try:
        _try_step(run, num_images)
    except Exception as error:
        if not lacks_memory(error):
            raise
        fits = False
    gc.collect()  # not in the except block, where the exception still refers to the tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fits


def _try_step(run: Run, num_images: int) -> None:
    """Make one step with a new network as the built-in loop does, on this worker alone, and drop the network."""
    config = run.config
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    model = run.build_model().to(run.device, dtype)
    average = WeightAverage(model, config.ema_decay) if config.ema_decay is not None else None
    optimizer = build_optimizer(config, model, run.num_classes)
    apply_options(model, config)
    model.eval()  # in training mode, batch norm refuses a single value
    images = torch.zeros(num_images, config.channels, *config.full_image_size, dtype=dtype, device=run.device)
    labels = torch.zeros(num_images, dtype=torch.int64, device=run.device)
    targets = labels if run.label_sets is None else run.label_sets[labels].to(dtype)
    with mixed_precision(config.precision, run.device):
        loss = copy.copy(run.loss)(model(images), targets)  # the loss of the run would note that it got labels
    loss.backward()
    optimizer.step()
    del average  # kept until here, because it takes memory, too


def out_of_memory(run: Run) -> RaytrainError:
    """Return the error to raise after a step or an evaluation has run out of memory.

    After a step, it is OutOfMemory, which asks for twice as many microbatches, or UsageError if not one image fits.
    After an evaluation, which has no microbatches, it is UsageError.
    """
    if run.evaluating:
        return UsageError(
            "The memory of a worker does not suffice for its images of an evaluation; use a smaller --image-size, or "
            "more workers."
        )
    return _out_of_memory(run, 2 * run.plan.accumulate)


def _out_of_memory(run: Run, num_microbatches: int) -> RaytrainError:
    """Return the error that asks for ``num_microbatches``, or for a smaller network if not even a single image fits."""
    if num_microbatches // 2 >= run.plan.batch_size:  # half as many were of one image each, and did not fit
        return UsageError(
            "The memory of a worker does not suffice for a single image; use --gradient-checkpointing, a smaller "
            "--image-size, or a smaller network."
        )
    before = run.plan.accumulate
    at_once = "at once" if before == 1 else f"in {before} microbatches"
    return OutOfMemory(
        f"The memory of a worker does not suffice for a global batch {at_once}; compute it with --accumulate "
        f"{num_microbatches}",
        num_microbatches,
    )
