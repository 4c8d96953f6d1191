"""Which images of a run are kept decoded in memory."""

from __future__ import annotations

from raytrain.config import ResolvedConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.data.dataset import Dataset
from raytrain.errors import UsageError

_AUTO_FRACTION = 0.4  # of that memory; the rest is for blocks that are streamed


def choose_cached(
    config: ResolvedConfig, data: Dataset, plan: BatchPlan, first_step: int, memory_bytes: int
) -> tuple[bool, bool]:
    """Whether the training images are kept in memory, and the test images.

    ``memory_bytes`` is what a machine has for them. Raises UsageError if ``--cache memory`` asks for more.
    """
    train_bytes, test_bytes = data.num_bytes
    if config.cache == "memory" and train_bytes + test_bytes > memory_bytes:
        raise UsageError(
            f"--cache is memory, and the decoded images take {(train_bytes + test_bytes) / 1e9:.1f} GB while a "
            f"machine has {memory_bytes / 1e9:.1f} GB for them; use --cache auto."
        )
    if config.cache == "auto":
        room = _AUTO_FRACTION * memory_bytes
        used_again = plan.num_steps - first_step > plan.steps_per_epoch
        used_again = used_again and not config.crops_originals
        return used_again and train_bytes + test_bytes <= room, test_bytes <= room
    return config.cache == "memory", config.cache == "memory"
