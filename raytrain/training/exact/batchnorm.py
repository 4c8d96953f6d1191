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
later like those of all parameters (:mod:`raytrain.training.exact.gradients`).

``freeze`` makes layers that keep their running statistics and normalise with them, whatever mode the model is in.
timm's ``BatchNormAct2d`` is converted, too, and stays followed by its activation, and so are subclasses.

Local batches may differ in size, and a rank without images in a step (``set_num_used(layers, 0)``) counts as nothing.
Parameters, buffers and state_dict keys are those of ``nn.BatchNorm``. Only the class of a layer changes, in place (as
with torch's lazy modules), so that hooks and references to it stay valid. The new class is a subclass of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from raytrain.errors import UsageError
from raytrain.training.exact import gather
from raytrain.training.exact.agreement import digest_of, digests_agree
from raytrain.training.exact.batch_statistics import (
    NormaliseTogether,
    all_ranks,
    global_statistics,
    num_different,
    unbiased,
    world_size,
)

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
    for layer in model.modules():  # also those of a copy of a converted model
        if isinstance(layer, AggregatedBatchNorm):
            layer.is_joined = True
    return model


def freeze(model: nn.Module) -> nn.Module:
    """Make the batch norm layers of ``model`` keep their running statistics, also in training, and return it.

    Layers without running statistics are left as they are. Call ``convert``, which changes these, after it.
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
    converted = [layer for layer in layers if isinstance(layer, ConvertedBatchNorm)]
    for layer in converted:
        if layer.placeholder != (num_used == 0):  # setting an attribute of a module takes longer than reading it
            layer.placeholder = num_used == 0
    synchronised = [layer for layer in converted if isinstance(layer, SynchronisedBatchNorm)]
    if weight is not None and synchronised and world_size() > 1:
        value = torch.tensor(weight, dtype=torch.float64)  # a plain number would be compiled into the network
        for layer in synchronised:
            layer.weight_of_loss = value


def count_once(model: nn.Module) -> None:
    """Have the converted layers of ``model`` count each batch once if gradient checkpointing repeats forwards.

    The repeated forward, in the backward, then changes no running statistics.
    """
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

    One all-reduce joins the last call of each layer. If a layer was called more than once, a second one joins all
    earlier calls. They are in float64, in which Σ m_j·(var_j + mean_j²) / M - mean_c² loses nothing to cancellation.

    Raises UsageError if the ranks have called a layer different numbers of times.
    """
    aggregated = [layer for layer in layers if isinstance(layer, AggregatedBatchNorm) and layer.updates_statistics]
    if all(layer.count is None for layer in aggregated):  # no call since the last time, or no such layer
        return
    calls_of_layers = [(layer, layer.take_calls()) for layer in aggregated]
    earlier = [(layer, call) for layer, calls in calls_of_layers for call in calls[:-1]]
    last = [(layer, calls[-1]) for layer, calls in calls_of_layers]
    # The last calls are joined first, because that also compares the numbers of calls. But they count last.
    updates = _joined_updates(last, [len(calls) for _, calls in calls_of_layers])
    if earlier:
        updates = [*_joined_updates(earlier), *updates]
    for update in updates:
        update.layer.update_running(update.mean, update.unbiased_variance, update.weight, update.counts)


class _Call(NamedTuple):
    """The statistics of one forward of an aggregated layer on this worker."""

    count: int  # values per channel; 0 if there were no images
    momentum: float  # weight of the batch in the running statistics
    mean: Tensor  # (C,)
    unbiased_variance: Tensor  # (C,)


class _Update(NamedTuple):
    """The statistics of one call of ``layer``, joined over the workers, for its running statistics."""

    layer: AggregatedBatchNorm
    mean: Tensor  # (C,)
    unbiased_variance: Tensor  # (C,)
    weight: Tensor  # (C,); 0 if the call does not count
    counts: Tensor  # (), bool


def _joined_updates(calls: list[tuple[AggregatedBatchNorm, _Call]], nums_calls: Sequence[int] = ()) -> list[_Update]:
    """Join the ``calls`` of all workers, and return what each of them adds to its layer's running statistics.

    ``nums_calls``, the number of calls of each layer, must be the same on all workers: otherwise UsageError is raised.
    """
    # The channels of all calls are in a row: C of them.
    sizes = [layer.num_features for layer, _ in calls]
    mean = torch.cat([call.mean for _, call in calls]).double()  # (C,)
    unbiased_variance = torch.cat([call.unbiased_variance for _, call in calls]).double()  # (C,)
    per_layer = torch.tensor([(call.count, call.momentum) for _, call in calls], dtype=torch.float64)
    per_channel = per_layer.repeat_interleave(torch.tensor(sizes), dim=0, output_size=sum(sizes))  # (C, 2)
    count, momentum = per_channel.T.to(mean.device, non_blocking=True)  # (C,) each
    variance = torch.where(count > 1, unbiased_variance * (count - 1) / count, 0.0)
    digest = torch.tensor(digest_of(nums_calls), dtype=torch.float64).to(mean.device, non_blocking=True)
    by_rank = torch.stack([count, mean, variance])[None]  # (1, 3, C); if the workers may have the same rows, (N, 3, C)
    if world_size() > 1 and gather.num_gathers:
        by_rank = all_ranks(by_rank)

    # Sum over the workers.
    sums = torch.cat([count, count * mean, count * (variance + mean.square()), digest])
    if world_size() > 1:
        dist.all_reduce(sums)
    total, sum_of_means, sum_of_squares, digest = sums.split([sum(sizes)] * 3 + [2])
    # Look at the digest where it costs nothing: on a CPU. On a GPU the host would wait for it, so it does only on a
    # worker that has called a layer more than once; of workers that differ, at least one has.
    if (digest.is_cpu or max(nums_calls, default=1) > 1) and not digests_agree(digest.tolist(), world_size()):
        raise UsageError(
            "The workers call a layer of aggregated batch norm different numbers of times in a step; call it equally "
            'often on every worker, or use --batch-norm sync (batch_norm="sync").'
        )

    # Compute the statistics of the global batch. A channel with a single value has no variance, and does not count.
    count = total.clamp(min=1)
    mean = sum_of_means / count
    variance = (sum_of_squares / count - mean.square()).clamp(min=0)
    counts = count > 1
    different = num_different(by_rank[:, 0], by_rank[:, 1], by_rank[:, 2], count) if len(by_rank) > 1 else count
    updates = torch.stack([mean, unbiased(variance, different), momentum * counts]).to(calls[0][0].batch_mean.dtype)
    statistics_of_calls = [of_call.unbind() for of_call in updates.split(sizes, dim=1)]  # three (C,) for each call
    return [
        _Update(layer, mean, variance, weight, counts_of_call[0])
        for (layer, _), (mean, variance, weight), counts_of_call in zip(
            calls, statistics_of_calls, counts.split(sizes), strict=True
        )
    ]


class ConvertedBatchNorm(_BatchNorm):
    """Base class of the batch norm layers that ``convert`` and ``freeze`` make of a network's own."""

    kinds: tuple[type[ConvertedBatchNorm], type[_BatchNorm]]  # the two bases of the layer's class
    placeholder: bool  # this rank's images don't count
    counts_once: bool  # a forward within a backward repeats an earlier one, for gradient checkpointing

    def prepare(self) -> None:
        """Give a layer that has just got this class the attributes of its kind."""

    @property
    def repeats(self) -> bool:
        """True in a forward that computes an earlier one again."""
        # A graph task is a backward that this thread is running.
        return self.counts_once and torch._C._current_graph_task_id() != -1  # pyright: ignore

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Let a copy or a pickle make the layer's class again by :func:`_new`, as that class has no name to import."""
        return _new, type(self).kinds, vars(self)

    def forward_again(self, input: Tensor) -> Tensor:
        """Compute as nn.BatchNorm does, on copies of the running statistics, which the first forward has updated.

        Checkpointing requires that as many tensors are saved for the backward as by the first forward.
        """
        running = (self.running_mean, self.running_var)
        mean, variance = (None if statistic is None else statistic.clone() for statistic in running)
        return _batch_norm(self, input, mean, variance, training=True)

    def next_momentum(self, number: int = 0) -> float:
        """Return the weight that the next batch, or the batch ``number`` after it, will have in the running statistics.

        With a momentum of None, these are the mean over all batches that count.
        """
        assert self.num_batches_tracked is not None
        return 1 / (1 + number + float(self.num_batches_tracked)) if self.momentum is None else self.momentum

    def update_running(self, mean: Tensor, variance: Tensor, weight: Tensor, counts: Tensor) -> None:
        """Add a batch's ``mean`` and unbiased ``variance``, (C,), to the running statistics with ``weight``.

        ``counts`` is 1, or 0 for a batch without variance, of a single value: its weight is 0, and it is not counted.
        """
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        # The statistics of a network in half precision are kept in that, and those of a batch are float32.
        mean, variance, weight = (tensor.to(self.running_mean.dtype) for tensor in (mean, variance, weight))
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)
        self.num_batches_tracked.add_(counts)


class _OfAnyShape(_BatchNorm):
    """Torch's SyncBatchNorm without its forward, which needs GPUs."""

    def _check_input_dim(self, input: Tensor) -> None: ...


class AggregatedBatchNorm(ConvertedBatchNorm):
    """Normalises with the statistics of the local batch, and keeps them for ``update_running_statistics``."""

    batch_mean: Tensor  # of the last call, (C,)
    batch_var: Tensor  # of the last call, unbiased, (C,)
    count: int | None  # values per channel in the last call; None if its statistics are joined already
    weight_of_batch: float  # of the last call, in the running statistics
    earlier: tuple[_Call, ...]  # the calls before the last one that are not joined either
    is_joined: bool = False  # by a caller; a copy that is not converted joins its statistics in each forward

    @property
    def updates_statistics(self) -> bool:
        """True if the layer is in training mode and has running statistics."""
        return self.training and self.track_running_stats

    def prepare(self) -> None:
        """Add the buffers in which a call leaves its statistics; checkpoints do not hold them."""
        self.count, self.weight_of_batch, self.earlier = None, 0.0, ()
        for name, running in zip(LOCAL_BUFFERS, (self.running_mean, self.running_var), strict=True):
            self.register_buffer(name, None if running is None else torch.zeros_like(running), persistent=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Have a copy know that nobody else joins its statistics, and not hold those of this layer's calls."""
        make, kinds, state = super().__reduce_ex__(protocol)
        return make, kinds, {**state, "is_joined": False, "count": None, "earlier": ()}

    def take_calls(self) -> list[_Call]:
        """Return the calls since the last time, and forget them. If there was none, return one with a count of 0."""
        last = _Call(self.count or 0, self.weight_of_batch, self.batch_mean, self.batch_var)
        calls = [*self.earlier, last]
        self.count, self.earlier = None, ()
        return calls

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised ``input``: (B, C, ...) -> (B, C, ...)."""
        # In evaluation mode, and on a single worker with images, torch does all that is needed.
        if not self.training or (world_size() == 1 and not self.placeholder):
            return self.forward_again(input) if self.training and self.repeats else super().forward(input)
        self._check_input_dim(input)
        # The statistics of the call before would be overwritten.
        if self.updates_statistics and not self.repeats:
            if self.count is not None:
                mean, variance = self.batch_mean.clone(), self.batch_var.clone()
                self.earlier += (_Call(self.count, self.weight_of_batch, mean, variance),)
            self.weight_of_batch = self.next_momentum(len(self.earlier))
        # A placeholder is normalised with the running statistics, so that it changes none.
        if self.placeholder:
            self.count = 0
            output = _batch_norm(self, input, self.running_mean, self.running_var, training=self.running_mean is None)
        else:
            # With momentum 1 the native kernel writes the batch's mean and unbiased variance into the buffers, at no
            # cost.
            self.count = input.numel() // input.shape[1]
            output = _batch_norm(self, input, self.batch_mean, self.batch_var, training=True)
        if not self.is_joined:
            update_running_statistics([self])
        return output


class FrozenBatchNorm(ConvertedBatchNorm):
    """Normalises with its running statistics, and never leaves eval mode.

    torchvision's FrozenBatchNorm2d would not do: it has no num_batches_tracked and makes buffers of the parameters, so
    that its checkpoints don't fit the plain model, and it knows 2 dimensions only.
    """

    def prepare(self) -> None:
        """Put the layer into eval mode."""
        self.training = False

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        """Stay in eval mode, whatever ``mode`` the model goes into."""
        return super().train(False)


class SynchronisedBatchNorm(ConvertedBatchNorm):
    """Normalises with the statistics of the global batch, and differentiates through them."""

    weight_of_loss: Tensor  # float64 (), see set_num_used

    def prepare(self) -> None:
        """Weight the loss as a rank's term of a sum, until ``set_num_used`` sets another weight."""
        self.weight_of_loss = torch.ones((), dtype=torch.float64)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised ``input``: (B, C, ...) -> (B, C, ...)."""
        count = 0 if self.placeholder else input.numel() // input.shape[1]  # values per channel on this rank
        # In evaluation mode, and on a single worker, torch does all that is needed; but it refuses a single value.
        if not self.training or (world_size() == 1 and count > 1):
            return self.forward_again(input) if self.training and self.repeats else super().forward(input)
        self._check_input_dim(input)
        mean, variance, total, different = global_statistics(input.detach(), count)
        if self.running_mean is not None and not self.repeats:
            counts = total > 1
            weight_of_batch = self.next_momentum() * counts.to(mean.dtype)
            self.update_running(mean, unbiased(variance, different), weight_of_batch, counts)
        # The kernel takes weights of the type of the statistics, float32, also if the network is in half precision.
        weight = torch.ones_like(mean) if self.weight is None else self.weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if self.bias is None else self.bias.to(mean.dtype)
        statistics = mean, variance, total, self.weight_of_loss
        return cast(Tensor, NormaliseTogether.apply(input, weight, bias, *statistics, self.eps, count == 0))


def _not_converted(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch norm layers of ``model`` that have no class of this module yet."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, ConvertedBatchNorm)
    ]


def _become(layer: _BatchNorm, kind: type[ConvertedBatchNorm]) -> None:
    """Make ``layer`` one of this ``kind``, in place: its new class inherits from its old one and from ``kind``."""
    plain_class = type(layer)
    if f"{plain_class.__module__}.{plain_class.__qualname__}" == _OF_TIMM:
        # timm's forward normalises, drops and activates. The first becomes ours, and a hook does the others after it.
        layer.register_forward_hook(_activate)
        plain_class = nn.BatchNorm2d
    if plain_class is nn.SyncBatchNorm:  # whose own forward would come before ours
        plain_class = _OfAnyShape
    layer.__class__ = _joined(kind, plain_class)
    converted = cast(ConvertedBatchNorm, layer)
    converted.placeholder = converted.counts_once = False  # torch.compile would compile again if they came later
    converted.prepare()


@cache
def _joined(kind: type[ConvertedBatchNorm], plain_class: type[_BatchNorm]) -> type[ConvertedBatchNorm]:
    """Return the class that inherits from ``plain_class`` and ``kind``, always the same one for both."""
    return type(kind.__name__, (plain_class, kind), {"kinds": (kind, plain_class)})  # pyright: ignore


def _new(kind: type[ConvertedBatchNorm], plain_class: type[_BatchNorm]) -> ConvertedBatchNorm:
    """Return a layer without content, to which a copy or a pickle adds the content.

    They cannot name the layer's class, which is made while a program runs, and so name its two bases.
    """
    joined = _joined(kind, plain_class)
    return joined.__new__(joined)


def _activate(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Apply the dropout and the activation of timm's layer, which follow its normalisation."""
    return layer.act(layer.drop(output))


def _batch_norm(
    layer: ConvertedBatchNorm, x: Tensor, mean: Tensor | None, variance: Tensor | None, *, training: bool
) -> Tensor:
    """Return ``x`` normalised by torch's kernel with the weights of ``layer``.

    With ``training``, the statistics are those of ``x``, which replace ``mean`` and ``variance`` (the momentum is 1);
    without it, they are ``mean`` and ``variance``.
    """
    return torch.batch_norm(
        x, layer.weight, layer.bias, mean, variance, training, 1.0, layer.eps, torch.backends.cudnn.enabled
    )
