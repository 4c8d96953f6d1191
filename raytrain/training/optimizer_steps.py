"""Follows the steps of a loop's optimizers, by torch's own step hooks, without replacing anything of the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from raytrain.config import ResolvedConfig
from raytrain.errors import UsageError, some_of
from raytrain.training.agreement import find_differing, find_not_on_all
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.optimisation import parameters_of, rising_rate
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.protocols import Worker


@contextmanager
def optimizer_hooks(before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Call ``before`` and ``after`` with the optimizer at each step of any optimizer of this process, in this context.

    Example: ``with optimizer_hooks(lambda optimizer, *_: print(optimizer), lambda *_: None): optimizer.step()``
    """
    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class OptimizerSteps:
    """Follows the optimizers: whether any has stepped since the loop got its batch, and at which learning rates.

    Args:
        share: returns m_j / M, as in :mod:`raytrain.training.gradients`.
        num_steps: number of steps of the whole run, over which a search for a learning rate raises the rate.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        models: PreparedModels,
        state: CheckpointState,
        worker: Worker,
        share: Callable[[], Tensor | float],
        num_steps: int,
    ) -> None:
        self.has_stepped = False  # since the loop got its batch
        self._rates: list[float | Tensor] = []  # of the groups of the optimizers in the last batch in which any stepped
        self._rates_step: int | None = None  # the step of that batch
        self.num_waiting: dict[Optimizer, int] = {}  # batches for which gradients of an optimizer wait for its step
        self._stepped: set[int] = set()  # IDs of the parameters that an optimizer has stepped since then
        self._gradients: dict[Optimizer, dict[int, tuple[int, int]]] = {}  # ID and version, after the last batch
        self._config, self._models, self._state, self._worker = config, models, state, worker
        self._share, self._num_steps = share, num_steps
        self._step: int | None = None  # the step of the current batch, counted from 0
        self._autocast_before: list[bool] = []  # one for each running step, as an optimizer may wrap another one
        self._first_rates: dict[Optimizer, list[float]] = {}  # in a search for a learning rate

    def followed(self) -> AbstractContextManager[None]:
        """Follow the steps of all optimizers of this process in this context."""
        return optimizer_hooks(self._before, self._after)

    def begin(self, step: int) -> None:
        """Follow the optimizers through the batch of ``step``, counted from 0."""
        self._step = step
        self.has_stepped = False
        self._stepped.clear()

    def end(self) -> None:
        """Note, after a batch, which of several optimizers have gradients that wait for a step in a later batch.

        They do if they have changed and no optimizer has stepped their parameters, as in a loop whose optimizers step
        at different paces: a checkpoint would lose them.
        """
        if len(self._state.optimizers) < 2:
            return
        for optimizer in self._state.optimizers:
            gradients = {
                id(parameter): (id(parameter.grad), parameter.grad._version)
                for parameter in parameters_of(optimizer)
                if parameter.grad is not None
            }
            before = self._gradients.get(optimizer, {})
            left = [number for number in gradients if number not in self._stepped]
            has_changed = any(gradients[number] != before.get(number) for number in left)
            number = self.num_waiting.get(optimizer, 0)
            self.num_waiting[optimizer] = number + 1 if left and (number or has_changed) else 0
            self._gradients[optimizer] = gradients

    def take_learning_rates(self) -> list[float | Tensor]:
        """Return the rates in the last batch in which an optimizer stepped; none if none has since the last call."""
        rates, self._rates = self._rates, []
        return rates

    def check_agreement(self, step: int) -> None:
        """Raise UsageError, on all workers, if they differ in the state of an optimizer after ``step`` steps.

        Checkpoints hold that of worker 0. Optimizers that divide their work among the processes keep, on each of them,
        the state of some of the weights alone: the run is right until it resumes.
        """
        if self._worker.world_size == 1:
            return
        tensors = self._state_tensors()
        names = find_not_on_all(tensors, self._worker.world_size)
        if not names:
            numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
            names = find_differing(numbers, step, self._worker.device)
        if names:
            raise UsageError(
                f"After step {step:,} the workers differ in the state of an optimizer, {some_of(names)}: checkpoints "
                "hold that of worker 0, so a resumed run would go on without the rest; take an optimizer that keeps "
                "all of its state on each worker, as one for a single device does, or train on one worker."
            )

    def _state_tensors(self) -> dict[str, Tensor]:
        """Return what the optimizers keep of each weight, by names such as ``momentum_buffer of 1.weight``."""
        weights, tensors = self._models.weight_names(), dict[str, Tensor]()
        for number, optimizer in enumerate(self._state.optimizers, start=1):
            prefix = f"optimizer {number}'s " if number > 1 else ""
            for key, kept in optimizer.state.items():
                of = weights.get(id(key), "a weight") if isinstance(key, Tensor) else str(key)
                for name, value in kept.items() if isinstance(kept, dict) else [("state", kept)]:
                    for index, leaf in enumerate(tree_leaves(value)):  # some keep lists of tensors
                        if isinstance(leaf, Tensor):
                            tensors[f"{prefix}{name}{f' {index}' if index else ''} of {of}"] = leaf
        return tensors

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Prepare a step of ``optimizer``; return arguments and options that replace those of the step, or None."""
        if self._step is None or not self._trains(optimizer):
            return None
        if not self._state.holds(optimizer):
            raise UsageError(
                f"The loop steps a {type(optimizer).__name__} that no checkpoint would hold, so a resumed run would "
                "lose its state; give it to run.prepare before the first batch."
            )
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not self._state.holds_scheduler(optimizer):
            raise UsageError(
                "The optimizer has a scheduler that no checkpoint would hold, so a resumed run would begin it again; "
                "give it to run.prepare, too."
            )

        self._state.load_added_groups(optimizer)

        # Gradients must be those of the global batch by now, also those that a loop has kept on the worker.
        self._models.gradients.sum_deferred()
        self._models.check_trained_by(optimizer)

        # A search for a learning rate sets the rate of the first group; other groups keep their ratio to it.
        if self._config.is_range_test:
            first_rates = self._first_rates.setdefault(optimizer, [])
            new = optimizer.param_groups[len(first_rates) :]  # a loop may add groups as it goes on
            first_rates += [float(group.get("initial_lr", group["lr"])) for group in new]
            if not first_rates[0]:
                raise UsageError("The first group of the optimizer starts with a learning rate of 0; start above 0.")
            rate = rising_rate(self._config, self._step, self._num_steps)
            for group, first_rate in zip(optimizer.param_groups, first_rates, strict=True):
                group["lr"] = rate * first_rate / first_rates[0]

        # A learning rate may be a tensor, which a scheduler changes in place. Reading it now would wait for the device.
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        before = self._rates if self._rates_step == self._step else []  # of other optimizers in this batch
        self._rates = [*before, *(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)]
        self._rates_step = self._step

        # Autocast is for the networks' computations: a step in 16 bits would lose small changes.
        device_type = self._worker.device.type
        self._autocast_before.append(torch.is_autocast_enabled(device_type))
        torch.set_autocast_enabled(device_type, False)

        # A closure returns the loss of this worker's images. The optimizer gets a closure that returns the loss of the
        # global batch instead. args[0] is the optimizer itself.
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._joined_loss, args[1]), *args[2:]), options
        if callable(options.get("closure")):
            return args, {**options, "closure": partial(self._joined_loss, options["closure"])}
        return None

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        """Note a step of ``optimizer``; torch calls this after each step of each optimizer."""
        if self._step is not None and self._trains(optimizer):
            self.has_stepped = True
            self._stepped.update(map(id, parameters_of(optimizer)))
            torch.set_autocast_enabled(self._worker.device.type, self._autocast_before.pop())

    def _trains(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` trains a prepared network, and not, say, the pixels of an image."""
        if self._state.holds(optimizer):
            return True
        ids = self._models.parameter_ids
        return any(id(parameter) in ids for parameter in parameters_of(optimizer))

    def _joined_loss(self, closure: Callable[[], Any]) -> Any:
        """Return the loss of the global batch for an optimizer that decides by it, such as LBFGS with a line search."""
        torch.set_autocast_enabled(self._worker.device.type, self._autocast_before[-1])
        try:
            loss = closure()
        finally:
            torch.set_autocast_enabled(self._worker.device.type, False)
        if not isinstance(loss, Tensor):
            return loss
        share = self._share()
        joined = loss.detach() * share if isinstance(share, Tensor) or share else torch.zeros_like(loss.detach())
        if self._worker.world_size > 1:
            dist.all_reduce(joined)
        return joined
