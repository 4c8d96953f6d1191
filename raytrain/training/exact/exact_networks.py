"""Networks whose weights, batch norm, dropout and gradients are those of all workers, in any process group of torch.

``run.prepare`` and ``raytrain.parallel`` change a network in place, by :class:`ExactNetworks`:

1. Its batch norm and dropout layers get other classes. These join the statistics of all workers, and draw random
   numbers that belong to a sample and not to a worker.
2. It gets the weights of worker 0, by :func:`broadcast_weights`.
3. :class:`~raytrain.training.exact.gradients.ExactGradients` follows its parameters, and sums their gradients over the
   workers during each backward, worker j's with the weight m_j / M: it has m_j of the M images of the global batch.

Layers and gradients depend on the images that come next, so :meth:`ExactNetworks.begin` is called before each
microbatch. A run knows the images from its plan. In any other loop, they have to be inferred: see
:mod:`raytrain.training.exact.data_parallel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain.data.plan.permutation import mix
from raytrain.errors import UsageError
from raytrain.training.exact import batchnorm, dropout, images_of_tensors
from raytrain.training.exact.gradients import ExactGradients
from raytrain.training.protocols import Worker

BatchNormMode = Literal["sync", "aggregate"]


def make_layers_exact(network: nn.Module, batch_norm: BatchNormMode, call: str) -> None:
    """Change the batch norm and dropout layers of ``network`` in place.

    Raises UsageError for a network of TorchScript, whose layers are hidden. ``call`` is the public function for the
    error's sentence.
    """
    scripts = [layer for layer in network.modules() if isinstance(layer, torch.jit.ScriptModule)]
    if any(list(script.parameters()) for script in scripts):
        raise UsageError(
            f"{call} got a network of torch.jit, whose batch norm and dropout cannot be joined over the workers; "
            "give it the network that was scripted or traced, and compile that one if it is to be faster."
        )
    batchnorm.convert(network, batch_norm)
    dropout.convert(network)


class ExactNetworks:
    """Networks that compute on several workers together the same as on one.

    Args:
        worker: this process among the workers, and its device.
        share: returns m_j / M, the part of the global batch's M images that this worker has at the moment, by which a
            backward multiplies gradients: a number, or a tensor () on the device; exactly 0.0 without images.
        gradients_in_bfloat16: send gradients in float32 as bfloat16, in half as many bytes.

    Example::

        networks = ExactNetworks(worker, share=lambda: 5 / 8)
        make_layers_exact(model, "sync", "my call")
        networks.join(model, sees_forwards=True)
        networks.begin(5, samples, step=0, seed=0, scales_gradients=True)  # this worker's 5 of 8 images come next
        cross_entropy(model(images), labels).backward()
    """

    def __init__(
        self,
        worker: Worker,
        share: Callable[[], Tensor | float],
        *,
        gradients_in_bfloat16: bool = False,
    ) -> None:
        self.trained: list[nn.Module] = []  # the networks, in the order in which they joined
        self.parameter_ids: set[int] = set()  # id() of each parameter at the begin of the microbatch
        self.gradients = ExactGradients(worker, share, self.end_backward, in_bfloat16=gradients_in_bfloat16)
        self._worker = worker
        self._layers: dict[nn.Module, list[nn.Module]] = {}  # of each network, at the begin of the microbatch
        self._parameters: list[Tensor] = []  # of all networks, each once
        self._dropouts: dict[nn.Module, list[nn.Module]] = {}  # the dropout layers of each network
        self._num_used = 0  # images of this worker in the microbatch
        self.num_channels: int | None = None  # of the microbatch's images, if a tensor like them may have views of each
        self._num_counted: dict[nn.Module, int] = {}  # images that the batch norm of each network counts at the moment

    def join(self, network: nn.Module, *, sees_forwards: bool) -> None:
        """Add a ``network`` whose layers are exact, and give it the weights of worker 0.

        With ``sees_forwards``, :meth:`before_forward` is called before each of its forwards.
        """
        if self._worker.world_size > 1:
            broadcast_weights(network)
        if sees_forwards:
            network.register_forward_pre_hook(BeforeForward(self), with_kwargs=True)
        self.trained.append(network)

    def begin(
        self,
        num_used: int,
        samples: Tensor | Callable[[], Tensor],
        *,
        step: int,
        seed: int,
        scales_gradients: bool,
        is_new: bool = True,
    ) -> None:
        """Make all networks ready for forwards and backwards of a microbatch.

        That also joins the statistics of batch norm that earlier forwards have left, and drops the gradients of a
        backward that has failed.

        Args:
            num_used: the number of this worker's images that count, m_j.
            samples: the images as rows of the manifest, int64 (m_j,), or a function that returns them, which is called
                only if dropout needs them.
            scales_gradients: False if this worker's gradients are those of the global batch already.
            step: counted from 0; dropout draws other numbers in each step.
            seed: of the random numbers of dropout.
            is_new: False if the loop gives the same images to a network again, so that dropout, which draws other
                numbers in each call, goes on to count its calls.
        """
        self.join_statistics()
        self.collect_layers()
        self._num_used = num_used
        self._num_counted = dict.fromkeys(self._layers, num_used)
        for number, (network, layers) in enumerate(self._layers.items()):
            batchnorm.set_num_used(layers, num_used, weight=num_used)
            self._dropouts[network] = dropout.begin(layers, samples, mix(seed, number), step, is_new=is_new)
        self.gradients.reset()
        if scales_gradients:
            self.gradients.follow(self._parameters)

    def collect_layers(self) -> None:
        """Collect the layers and parameters of all networks, because a loop may change its networks at any time.

        The walk costs measurable time in a step of a small network, so both are collected together.
        """
        self._layers = {network: list(network.modules()) for network in self.trained}
        owners = (layer._parameters for layers in self._layers.values() for layer in layers)  # pyright: ignore[reportPrivateUsage]
        # Layers may share a parameter. The dictionary is keyed by id, because hashing a tensor is slow.
        parameter_of_id: dict[int, Tensor] = {
            id(tensor): tensor for owner in owners for tensor in owner.values() if tensor is not None
        }
        parameters = list(parameter_of_id.values())
        # During torch.func.functional_call, plain tensors take the places of parameters. Gradients still flow to the
        # parameters, so these stay as they were collected before.
        if Tensor in set(map(type, parameters)):
            return
        self._parameters, self.parameter_ids = parameters, set(parameter_of_id)

    def before_forward(self, network: nn.Module, images: Tensor | None, num_rows: int) -> None:
        """Have batch norm and dropout of ``network`` know which ``images`` its next forward gets, and which count.

        ``images`` is the first tensor that the network gets, with ``num_rows`` rows. They may be of an earlier
        microbatch, in which this worker had images and now has none, or the other way round. A network that was added
        since the microbatch began counts all its images, as new layers do.
        """
        if network not in self._layers:
            return
        local = images_of_tensors.known(images)
        num_used = self._num_used if local is None else local.num_used
        # To the layers, only the difference between no images and some images matters.
        if (num_used == 0) != (self._num_counted[network] == 0):
            batchnorm.set_num_used(self._layers[network], num_used)
            self._num_counted[network] = num_used
        if images is not None and images.ndim == 4 and images.shape[1] == self.num_channels:
            dropout.follow_views(self._dropouts.get(network, ()), images)

    def end_backward(self) -> None:
        """Update the running statistics of batch norm; called after each backward, when its gradients have arrived."""
        self.join_statistics()

    def join_statistics(self) -> None:
        """Update the running statistics of aggregated batch norm from all workers' images since the last time."""
        for layers in self._layers.values():
            batchnorm.update_running_statistics(layers)


def broadcast_weights(model: nn.Module) -> None:
    """Give ``model`` the parameters and buffers that it has on worker 0."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    rows = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]  # as bytes, so that one broadcast suffices
    if not rows:
        return
    together = torch.cat(rows)
    dist.broadcast(together, src=0)
    for tensor, row in zip(tensors, together.split([len(row) for row in rows]), strict=True):
        tensor.copy_(row.clone().view(tensor.dtype).view(tensor.shape))  # cloned, so that its address is aligned


class BeforeForward:
    """A hook before each forward of a network, which gives the images among the inputs to ``networks``.

    A copy or a pickle of a network gets a hook that does nothing, because the copy is not prepared.
    """

    _torchdynamo_disable = True  # so that torch.compile does not compile the hook

    def __init__(self, networks: ExactNetworks | None = None) -> None:
        self.networks = networks

    @torch._disable_dynamo  # pyright: ignore  # so that it does not compile the functions that the hook calls either
    def __call__(self, network: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self.networks is not None:
            self.networks.before_forward(network, *rows_among((*inputs, *options.values())))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle this hook as one without networks."""
        return BeforeForward, ()


def rows_among(inputs: Iterable[Any]) -> tuple[Tensor | None, int]:
    """Return the first tensor with rows among ``inputs`` of a network, and the number of rows.

    Lists, dictionaries, records and other objects are searched in their order. A list that has for each image a tensor
    (C, H, W), or a dictionary with one, counts as a batch of as many images, an empty list as one of no images: None
    and 0. Without any tensor, return None and 1.

    In a record or another object, which may be one of settings with a mean for each channel, tensors of fewer than
    four dimensions count only if there is nothing else.

    Example: ``rows_among([NestedTensor(images, mask)])  # images, len(images)``
    """
    inputs = tuple(inputs)
    return _find_rows(inputs, in_objects=4) or _find_rows(inputs, in_objects=1) or (None, 1)


def _find_rows(
    inputs: Iterable[Any], in_objects: int, fewest: int = 1, searches_objects: bool = True
) -> tuple[Tensor | None, int] | None:
    """Return what :func:`rows_among` does; None without any tensor.

    Tensors count if they have at least ``fewest`` dimensions, and within records and other objects ``in_objects``.
    """
    for value in inputs:
        if isinstance(value, Tensor) and value.ndim >= fewest:
            return value, len(value)
        if isinstance(value, list) and all(isinstance(image, Tensor) and image.ndim == 3 for image in value):
            return (value[0] if value else None), len(value)

        # Search containers, dataclasses, and objects such as DETR's NestedTensor, but not objects within these, which
        # may refer to each other.
        if isinstance(value, Mapping):
            inner = _find_rows(value.values(), in_objects, fewest, searches_objects)
        elif isinstance(value, (list, tuple)):
            inner = _find_rows(value, in_objects, fewest, searches_objects)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            inner = _find_rows(fields, in_objects, in_objects, searches_objects)
        elif searches_objects and not isinstance(value, (type, ModuleType, FunctionType, nn.Module)):
            inner = _find_rows(getattr(value, "__dict__", {}).values(), in_objects, in_objects, searches_objects=False)
        else:
            continue
        if inner is None or inner[0] is None:
            continue
        if isinstance(value, list) and inner[0].ndim == 3 and isinstance(value[0], Mapping):
            return inner[0], len(value)
        return inner
    return None
