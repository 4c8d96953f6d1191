"""The network that a loop of the user's own prepares: the loop is run as far as its first epoch, and trains nothing.

A checkpoint has the weights of such a network and no code. The loop has the code: it builds its networks, gives them to
``run.prepare``, and then asks for ``run.epochs()``. Here it gets a run that notes what it prepares by the names that
checkpoints give, and leaves the loop by an exception as soon as it asks for an epoch, or for an evaluation before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from raytrain.config import ResolvedConfig
from raytrain.config.pickled_code import send_own_code
from raytrain.config.user_code import in_one_sentence
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.errors import UsageError
from raytrain.runs.outcome import Progress
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.training.checkpoint_state import MEASURED
from raytrain.training.metrics.prepared_metrics import is_metric
from raytrain.training.networks.model import initialise_lazy_layers, model_of
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.optimisation import build_optimizer, build_scheduler
from raytrain.training.random_numbers import kept_generators


class _ImagesNeeded(BaseException):
    """Leaves the loop when it asks for images. It is not an Exception, because a loop might catch that."""


@dataclasses.dataclass
class _Preparing:
    """A run as a loop sees it until it asks for its epochs: one worker on the CPU, nothing restored.

    Its attributes and methods are those of :class:`raytrain.training.run.Run` that a loop may use before its first
    epoch. ``networks`` has what the loop has prepared so far, by the names that checkpoints give.
    """

    config: ResolvedConfig
    classes: tuple[str, ...]
    plan: BatchPlan
    folder: Path

    # The same for every loop.
    device = torch.device("cpu")
    rank, world_size = 0, 1
    progress = Progress()

    def __post_init__(self) -> None:
        self.networks: dict[str, nn.Module] = {}
        self._num_of_kind: dict[str, int] = {}  # how many things of each kind have a name
        self._first: nn.Module | None = None  # the first network, whose average is the one that is evaluated

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def build_model(self) -> nn.Module:
        return model_of(self.config, self.num_classes)

    def build_optimizer(self, model: nn.Module) -> Any:
        return build_optimizer(self.config, model, self.num_classes)

    def build_scheduler(self, optimizer: Any) -> Any:
        return build_scheduler(self.config, self.plan, optimizer)

    def prepare(self, thing: Any) -> Any:
        """Note ``thing`` under the name that checkpoints give it."""
        # The same rule as in PreparedModels: a name for each kind, and a number from the second one on.
        if isinstance(thing, WeightAverage):
            self.networks[self._name("average" if thing.source is self._first else "state")] = thing.model
        elif isinstance(thing, nn.Module) and not is_metric(thing):
            initialise_lazy_layers(thing, self.config.channels, self.config.full_image_size)
            self._first = self._first or thing
            self.networks[self._name("model")] = thing.module if isinstance(thing, AveragedModel) else thing
        else:
            self._name("optimizer" if isinstance(thing, torch.optim.Optimizer) else "state")
        return thing

    def epochs(self, evaluate: object = None) -> Iterator[Any]:
        raise _ImagesNeeded

    def total(self, sums: Tensor | Sequence[float]) -> list[float]:
        return torch.as_tensor(sums, dtype=sums.dtype if isinstance(sums, Tensor) else torch.float64).tolist()

    def gather(self, rows: Any) -> Tensor:
        return torch.as_tensor(rows)

    def no_sync(self, enabled: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def _use_images(self, *arguments: object, **options: object) -> Any:
        """Stand for what a loop may refer to before it has images, as in ``criterion = run.loss``, and calls later."""
        raise _ImagesNeeded

    evaluate = evaluation_batches = keys = log = loss = mean = accuracy = show = train_head_first = _use_images

    def _name(self, kind: str) -> str:
        """Return the name of the next thing of this kind: ``model``, then ``model-2`` and so on."""
        number = self._num_of_kind[kind] = self._num_of_kind.get(kind, 0) + 1
        return kind if number == 1 else f"{kind}-{number}"


def loop_network(
    config: ResolvedConfig, classes: tuple[str, ...], loop: Callable[[Any], None], name: str | None
) -> nn.Module:
    """Return the network that ``loop`` prepares, with untrained weights; ``name`` is its name in checkpoints.

    Raise UsageError if the loop fails before it asks for its epochs, or prepares no such network.
    """
    # The plan has one image: the loop may ask for the number of epochs and steps, but never gets a batch.
    plan = BatchPlan(1, config.batch_size, config.epochs, config.seed)
    failed = "The loop, run as far as its first epoch for its network, failed"
    with TemporaryFolder() as folder:
        run = _Preparing(config, classes, plan, folder)
        with kept_generators(run.device), in_one_sentence(failed), suppress(_ImagesNeeded):
            send_own_code()  # to processes that the loop starts
            loop(run)

    # A run is evaluated with the average of its weights, if its loop keeps one. Checkpoints may have the weights of the
    # last evaluation beside the newest ones, under the network's name with a suffix.
    wanted = (name or ("average" if "average" in run.networks else "model")).removesuffix(MEASURED)
    if wanted not in run.networks:
        raise UsageError(
            f"The run was measured with the network that checkpoints call {wanted}, and its loop prepares "
            f"{', '.join(run.networks) or 'none'} before its first epoch; it must prepare what it did when it trained."
        )
    return run.networks[wanted].float()
