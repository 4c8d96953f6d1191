"""Batch norm with the statistics of the global batch, however it is divided over workers.

``convert`` turns the ``nn.BatchNorm`` layers of a model into one of two kinds:

- synchronised: every local batch is normalised with the statistics of the global batch, so N workers compute what one
  would;
- aggregated: every local batch is normalised with its own statistics, and ``update_running_statistics`` then joins
  them.

Worker j has n_j values of a channel (its images times their pixels) with the mean μ_j and the biased variance σ²_j, and
n = Σ n_j. Then the global batch has (Chan et al. 1983)::

    μ  = Σ n_j·μ_j / n
    σ² = Σ n_j·(σ²_j + (μ_j - μ)²) / n

Both kinds update the running statistics as torch does, by their momentum, with μ and the unbiased σ²·n / (n - 1).

For a synchronised layer, the forward gathers n_j, μ_j and σ²_j from all workers (``batch_statistics.py``). With
x̂ = (x - μ)/σ and the gradient g of the loss for the output, the gradient for the input x is (Ioffe and Szegedy 2015)::

    γ/σ · (g - Σg / n - x̂·Σ(g·x̂) / n)

where the sums are over the global batch: an all-reduce in the backward. The loss that a worker differentiates is
the mean over its own images, which counts m_j / M in the global batch. So what a worker adds to these sums is weighted
by m_j, and divided by its own afterwards: M cancels. The gradients of γ and β are the local sums, which are joined
later like those of all parameters (:mod:`raytrain.training.gradients`).

``freeze`` makes layers that keep their running statistics and normalise with them, whatever mode the model is in.
timm's ``BatchNormAct2d`` is converted, too, and stays followed by its activation, and so are subclasses.

Local batches may differ in size, and a rank without images in a step (``set_num_used(layers, 0)``) counts as nothing.
Parameters, buffers and state_dict keys are those of ``nn.BatchNorm``. Only the class of a layer changes, in place (as
with torch's lazy modules), so that hooks and references to it stay valid. The new class is a subclass of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from raytrain.errors import UsageError
from raytrain.training.agreement import digest_of, digests_agree
from raytrain.training.batch_statistics import NormaliseTogether, global_statistics, unbiased, world_size

_OF_TIMM = "timm.layers.norm_act.BatchNormAct2d"  # recognised by its name, so that timm is not imported
LOCAL_BUFFERS = ("batch_mean", "batch_var")  # of aggregated layers, which differ between workers


def convert(model: nn.Module, mode: Literal["sync", "aggregate"]) -> nn.Module:
    """Change the batch norm layers of ``model`` in place, and return it.

    Torch's own SyncBatchNorm is synchronised in any mode. A subclass of ``nn.BatchNorm`` keeps its methods around the
    ``forward`` that it inherits.

    Example::

        convert(model, "sync")
        set_num_used(model.modules(), len(images))  # before model(images)
    """
    for layer in _not_converted(model):
        is_aggregated = mode == "aggregate" and not isinstance(layer, nn.SyncBatchNorm)
        _become(layer, AggregatedBatchNorm if is_aggregated else SynchronisedBatchNorm)
    return model


def freeze(model: nn.Module) -> nn.Module:
    """Make the batch norm layers of ``model`` keep their running statistics, also in training, and return it.

    Call it before ``convert``, to which layers without running statistics are left.
    """
    for layer in _not_converted(model):
        if layer.running_mean is not None:
            _become(layer, FrozenBatchNorm)
    return model


def set_num_used(layers: Iterable[nn.Module], num_used: int, weight: float | None = None) -> None:
    """Set, before a forward, how many images of this rank's batch count: all of them, or 0 if they are a placeholder.

    A placeholder (any images) takes part in the collectives of the step, and changes nothing.

    Args:
        weight: of this rank's loss in that of the global batch, relative to the other ranks' weights: m_j, if the loss
            is the mean over this rank's m_j images. None leaves it as it was; a new layer has 1, for a loss that is
            this rank's term of a sum over the global batch.
    """
    joined = [layer for layer in layers if isinstance(layer, ConvertedBatchNorm)]
    for layer in joined:
        if layer.placeholder != (num_used == 0):
            layer.placeholder = num_used == 0
    synchronised = [layer for layer in joined if isinstance(layer, SynchronisedBatchNorm)]
    if weight is not None and synchronised and world_size() > 1:
        value = torch.tensor(weight, dtype=torch.float64)  # a number would be compiled into the network
        for layer in synchronised:
            layer.weight_of_loss = value


def count_once(model: nn.Module) -> None:
    """Have the layers of ``model`` leave forwards out of their statistics that gradient checkpointing repeats."""
    for layer in model.modules():
        if isinstance(layer, ConvertedBatchNorm):
            layer.counts_once = True


@torch.no_grad()
def update_running_statistics(layers: Iterable[nn.Module]) -> None:
    """Update the running statistics of aggregated ``layers`` over all ranks, with all calls since the last time.

    With m_j values per channel on worker j and M of them in all, mean_c = Σ m_j·mean_j / M and var_c = Σ m_j·[var_j +
    (mean_j - mean_c)²] / M: the formula of MATLAB's "Train Network in Parallel with Custom Training Loop". There it is
    applied to the running statistics of the workers. Here it is applied to the statistics of the batch, which then
    enter the running ones with the layer's momentum and the unbiased variance, as nn.BatchNorm does with a whole batch.
    If a layer was called several times, such as for two views of each image, each call counts, in their order.

    One all-reduce serves all layers, and a second one what was before their last calls. They are in float64, in which
    Σ m_j·(var_j + mean_j²) / M - mean_c² loses nothing to cancellation.
    """
    aggregated = [layer for layer in layers if isinstance(layer, AggregatedBatchNorm) and layer.updates_statistics]
    if all(layer.count is None for layer in aggregated):  # also if there is none
        return
    calls = [(layer, layer.take_calls()) for layer in aggregated]
    earlier = [(layer, call) for layer, of_layer in calls for call in of_layer[:-1]]
    last = _updates([(layer, of_layer[-1]) for layer, of_layer in calls], [len(of_layer) for _, of_layer in calls])
    for layer, *update in [*(_updates(earlier) if earlier else ()), *last]:
        layer.update_running(*update)


_Call = tuple[int, float, Tensor, Tensor]
"""Values per channel on this worker, weight in the running statistics, mean and unbiased variance (C,)."""


def _updates(calls: list[tuple[AggregatedBatchNorm, _Call]], numbers: Sequence[int] = ()) -> list[tuple[Any, ...]]:
    """Return mean, variance, weight and count that each layer adds to its running statistics.

    All ``calls`` of all workers are joined. ``numbers`` of calls of each layer must be the same on all workers.
    """
    sizes = [layer.num_features for layer, _ in calls]
    mean = torch.cat([mean for _, (*_, mean, _) in calls]).double()  # (C,), the channels of all calls in a row
    unbiased_variance = torch.cat([variance for _, (*_, variance) in calls]).double()
    per_layer = torch.tensor([call[:2] for _, call in calls], dtype=torch.float64)
    per_channel = per_layer.repeat_interleave(torch.tensor(sizes), dim=0, output_size=sum(sizes))  # (C, 2)
    count, momentum = per_channel.T.to(mean.device, non_blocking=True)  # (C,) each
    variance = torch.where(count > 1, unbiased_variance * (count - 1) / count, 0.0)
    digest = torch.tensor(digest_of(numbers), dtype=torch.float64).to(mean.device, non_blocking=True)
    sums = torch.cat([count, count * mean, count * (variance + mean.square()), digest])
    if world_size() > 1:
        dist.all_reduce(sums)
    *sums, digest = sums.split([sum(sizes)] * 3 + [2])
    # On a GPU the host waits only if a layer was called more than once: one of the workers that differ has such a
    # layer.
    if (digest.is_cpu or max(numbers, default=1) > 1) and not digests_agree(digest.tolist(), world_size()):
        raise UsageError(
            "The workers call a layer of aggregated batch norm different numbers of times in a step; call it equally "
            'often on every worker, or use --batch-norm sync (batch_norm="sync").'
        )
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    variance = (sums[2] / count - mean.square()).clamp(min=0)
    counted = count > 1
    updates = torch.stack([mean, unbiased(variance, count), momentum * counted]).to(calls[0][0].batch_mean.dtype)
    by_layer = zip(calls, updates.split(sizes, dim=1), counted.split(sizes), strict=True)
    return [(layer, *update, counts[0]) for (layer, _), update, counts in by_layer]


class ConvertedBatchNorm(_BatchNorm):
    """The base of all kinds. Layers get their class from ``convert`` or ``freeze``, never from a constructor."""

    kinds: tuple[type[ConvertedBatchNorm], type[_BatchNorm]]  # the two bases of the layer's class
    placeholder: bool  # this rank's images don't count
    counts_once: bool  # a forward in a backward repeats an earlier one, for gradient checkpointing

    def prepare(self) -> None: ...

    @property
    def repeats(self) -> bool:
        """True in a forward that computes an earlier one again."""
        return self.counts_once and torch._C._current_graph_task_id() != -1  # pyright: ignore

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new, type(self).kinds, vars(self)

    def forward_again(self, input: Tensor) -> Tensor:
        """Compute as nn.BatchNorm does, on copies of the running statistics, which the first forward has updated.

        Checkpointing requires that as many tensors are saved for the backward as by the first forward.
        """
        running = (self.running_mean, self.running_var)
        mean, variance = (None if statistic is None else statistic.clone() for statistic in running)
        return _batch_norm(self, input, mean, variance, training=True)

    def next_momentum(self, number: int = 0) -> float:
        """Return the weight in the running statistics of the next batch, or of one ``number`` after it, if it
        counts."""
        assert self.num_batches_tracked is not None
        return 1 / (1 + number + float(self.num_batches_tracked)) if self.momentum is None else self.momentum

    def update_running(self, mean: Tensor, variance: Tensor, weight: Tensor, counts: Tensor) -> None:
        """Add a batch's statistics with ``weight``, which is 0 for a batch without variance: it does not count."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)
        self.num_batches_tracked.add_(counts)


class _OfAnyShape(_BatchNorm):
    """Torch's SyncBatchNorm without its forward, which needs GPUs."""

    def _check_input_dim(self, input: Tensor) -> None: ...


class AggregatedBatchNorm(ConvertedBatchNorm):
    """Normalises with the statistics of the local batch, and keeps them for ``update_running_statistics``."""

    batch_mean: Tensor
    batch_var: Tensor
    count: int | None  # values per channel in the last call, if its statistics wait to be joined
    weight_of_batch: float  # of that call in the running statistics
    earlier: tuple[_Call, ...]  # the calls before that one

    @property
    def updates_statistics(self) -> bool:
        """True if the layer is in training mode and has running statistics."""
        return self.training and self.track_running_stats

    def prepare(self) -> None:
        self.count, self.weight_of_batch, self.earlier = None, 0.0, ()
        for name, running in zip(LOCAL_BUFFERS, (self.running_mean, self.running_var), strict=True):
            self.register_buffer(name, None if running is None else torch.zeros_like(running), persistent=False)

    def take_calls(self) -> list[_Call]:
        """Return the calls since the last time, and forget them; one of count 0 if there was none."""
        calls = [*self.earlier, (self.count or 0, self.weight_of_batch, self.batch_mean, self.batch_var)]
        self.count, self.earlier = None, ()
        return calls

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised ``input``: (B, C, ...) -> (B, C, ...)."""
        if not self.training or (world_size() == 1 and not self.placeholder):
            return self.forward_again(input) if self.training and self.repeats else super().forward(input)
        self._check_input_dim(input)
        if self.updates_statistics and not self.repeats:
            if self.count is not None:
                self.earlier += ((self.count, self.weight_of_batch, self.batch_mean.clone(), self.batch_var.clone()),)
            self.weight_of_batch = self.next_momentum(len(self.earlier))
        if self.placeholder:
            self.count = 0
            return _batch_norm(self, input, self.running_mean, self.running_var, training=self.running_mean is None)
        self.count = input.numel() // input.shape[1]
        # With momentum 1 the native kernel writes the batch's mean and unbiased variance into the buffers, at no cost.
        return _batch_norm(self, input, self.batch_mean, self.batch_var, training=True)


class FrozenBatchNorm(ConvertedBatchNorm):
    """Normalises with its running statistics, and never leaves eval mode.

    torchvision's FrozenBatchNorm2d would not do: it has no num_batches_tracked and makes buffers of the parameters, so
    that its checkpoints don't fit the plain model, and it knows 2 dimensions only.
    """

    def prepare(self) -> None:
        self.training = False

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        """Stay in eval mode, whatever ``mode`` the model goes into."""
        return super().train(False)


class SynchronisedBatchNorm(ConvertedBatchNorm):
    """Normalises with the statistics of the global batch, and differentiates through them."""

    weight_of_loss: Tensor  # float64 (), see set_num_used

    def prepare(self) -> None:
        self.weight_of_loss = torch.ones((), dtype=torch.float64)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised ``input``: (B, C, ...) -> (B, C, ...)."""
        count = 0 if self.placeholder else input.numel() // input.shape[1]
        if not self.training or (world_size() == 1 and count > 1):
            return self.forward_again(input) if self.training and self.repeats else super().forward(input)
        self._check_input_dim(input)
        mean, variance, total = global_statistics(input.detach(), count)
        if self.running_mean is not None and not self.repeats:
            counts = total > 1
            self.update_running(mean, unbiased(variance, total), self.next_momentum() * counts.to(mean.dtype), counts)
        weight = torch.ones_like(mean) if self.weight is None else self.weight
        bias = torch.zeros_like(mean) if self.bias is None else self.bias
        statistics = mean, variance, total, self.weight_of_loss
        return cast(Tensor, NormaliseTogether.apply(input, weight, bias, *statistics, self.eps, count == 0))


def _not_converted(model: nn.Module) -> list[_BatchNorm]:
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, ConvertedBatchNorm)
    ]


def _become(layer: _BatchNorm, kind: type[ConvertedBatchNorm]) -> None:
    plain_class = type(layer)
    if f"{plain_class.__module__}.{plain_class.__qualname__}" == _OF_TIMM:
        layer.register_forward_hook(_activate)
        plain_class = nn.BatchNorm2d
    if plain_class is nn.SyncBatchNorm:  # which has a forward of its own
        plain_class = _OfAnyShape
    layer.__class__ = _joined(kind, plain_class)
    converted = cast(ConvertedBatchNorm, layer)
    converted.placeholder = converted.counts_once = False  # torch.compile would compile again if they came later
    converted.prepare()


@cache
def _joined(kind: type[ConvertedBatchNorm], plain_class: type[_BatchNorm]) -> type[ConvertedBatchNorm]:
    return type(kind.__name__, (plain_class, kind), {"kinds": (kind, plain_class)})  # pyright: ignore


def _new(kind: type[ConvertedBatchNorm], plain_class: type[_BatchNorm]) -> ConvertedBatchNorm:
    """Return a layer without content, for a copy or a pickle, which know no class that is made while a program runs."""
    joined = _joined(kind, plain_class)
    return joined.__new__(joined)


def _activate(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Apply the dropout and the activation of timm's layer, which follow its normalisation."""
    return layer.act(layer.drop(output))


def _batch_norm(
    layer: ConvertedBatchNorm, x: Tensor, mean: Tensor | None, variance: Tensor | None, *, training: bool
) -> Tensor:
    return torch.batch_norm(
        x, layer.weight, layer.bias, mean, variance, training, 1.0, layer.eps, torch.backends.cudnn.enabled
    )
