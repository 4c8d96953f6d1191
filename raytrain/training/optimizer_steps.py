"""Follows the steps of a loop's optimizers, by torch's own step hooks, without replacing anything of the optimizers.

Before each step, deferred gradients are summed over the workers, and it is checked that checkpoints hold what the step
changes. During the step, autocast is off, and a closure returns the loss of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from raytrain.config import ResolvedConfig
from raytrain.errors import UsageError, some_of
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.exact.agreement import find_differing, find_not_on_all
from raytrain.training.exact.gradients import parameters_of
from raytrain.training.optimisation import rising_rate
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.protocols import Worker

_LATE = (
    "the loop computes with a batch after it has asked for the next one: a checkpoint or a stop in between counts the "
    "batch, without what the network learns from it, so a resume leaves it out; compute with each batch before asking "
    "for the next one, as a run reads images ahead by itself"
)


@contextmanager
def optimizer_hooks(before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Call ``before`` and ``after`` at each step of any optimizer of this process, in this context.

    Both get the optimizer, and the arguments of its ``step`` as a tuple and a dictionary. ``before`` may return other
    ones.

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
        share: returns m_j / M, as in :mod:`raytrain.training.exact.gradients`.
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
        self._stepped: set[int] = set()  # IDs of the parameters that optimizers have stepped in the current batch
        # After the last batch, the gradients of each optimizer: by the ID of the parameter, ID and version of its grad.
        self._gradients: dict[Optimizer, dict[int, tuple[int, int]]] = {}
        self._config, self._models, self._state, self._worker = config, models, state, worker
        self._share, self._num_steps = share, num_steps
        self._step: int | None = None  # the step of the current batch, counted from 0
        # Whether autocast was on before each running step: a stack, because an optimizer may wrap another one.
        self._autocast_before: list[bool] = []
        self._first_rates: dict[Optimizer, list[float]] = {}  # of its groups, in a search for a learning rate

    def followed(self) -> AbstractContextManager[None]:
        """Follow the steps of all optimizers of this process in this context."""
        return optimizer_hooks(self._before, self._after)

    def begin(self, step: int) -> None:
        """Follow the optimizers through the batch of ``step``, counted from 0."""
        self._step = step
        self.has_stepped = False
        self._stepped.clear()
        self._autocast_before.clear()  # a step that has raised an error leaves its entry

    def end(self) -> None:
        """Count in ``num_waiting``, after a batch, for how many batches each optimizer's gradients wait for its step.

        They wait if they have changed and no optimizer has stepped their parameters, as in a loop whose optimizers step
        at different paces: a checkpoint would lose them. With a single optimizer, nothing is counted, because
        ``has_stepped`` says the same.
        """
        if len(self._state.optimizers) < 2:
            return
        for optimizer in self._state.optimizers:
            gradients = {
                id(parameter): (id(parameter.grad), parameter.grad._version)
                for parameter in parameters_of(optimizer)
                if parameter.grad is not None
            }
            # Gradients that have not changed in this batch are left over from a step, unless they waited before.
            gradients_before = self._gradients.get(optimizer, {})
            not_stepped = [key for key in gradients if key not in self._stepped]
            has_changed = any(gradients[key] != gradients_before.get(key) for key in not_stepped)
            num_waiting = self.num_waiting.get(optimizer, 0)
            self.num_waiting[optimizer] = num_waiting + 1 if not_stepped and (num_waiting or has_changed) else 0
            self._gradients[optimizer] = gradients

    def take_learning_rates(self) -> list[float | Tensor]:
        """Return the learning rates of all groups in the last batch in which an optimizer stepped, and forget them.

        There are none if no optimizer has stepped since the last call.
        """
        rates, self._rates = self._rates, []
        return rates

    def check_agreement(self, step: int) -> None:
        """Raise UsageError, on all workers, if they differ in the state of an optimizer after ``step`` steps.

        Checkpoints hold the state of worker 0. Optimizers that divide their work among the processes keep, on each of
        them, the state of some of the weights alone: the run is right until it resumes.
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
            # Usually the state of each weight is a dictionary of tensors and numbers. Some optimizers keep something of
            # all weights together, by a text, or lists of tensors.
            for key, kept in optimizer.state.items():
                owner = weights.get(id(key), "a weight") if isinstance(key, Tensor) else str(key)
                for name, value in kept.items() if isinstance(kept, dict) else [("state", kept)]:
                    for index, leaf in enumerate(tree_leaves(value)):
                        if isinstance(leaf, Tensor):
                            tensors[f"{prefix}{name}{f' {index}' if index else ''} of {owner}"] = leaf
        return tensors

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Prepare a step of ``optimizer``; torch calls this before each step of each optimizer.

        Return arguments and options that replace those of the step, or None. ``args[0]`` is the optimizer itself.
        """
        # Steps before the first batch, and of what is in no prepared network, are none of the run's.
        if self._step is None or not self._trains(optimizer):
            return None
        self._check_in_checkpoints(optimizer)
        self._state.load_added_groups(optimizer)

        # Gradients must be those of the global batch by now, also those that a loop has kept on the worker.
        self._models.gradients.sum_deferred()
        self._models.check_trained_by(optimizer)

        # Set the learning rates in a search for one, and note them after those of other optimizers in the same batch. A
        # rate may be a tensor, which a scheduler changes in place, so it is copied: reading it would wait for a device.
        if self._config.is_range_test:
            self._set_rising_rates(optimizer, self._step)
        if self._rates_step != self._step:
            self._rates, self._rates_step = [], self._step
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        self._rates += [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

        # Autocast is for the networks' computations: a step in 16 bits would lose small changes. _after restores it.
        device_type = self._worker.device.type
        self._autocast_before.append(torch.is_autocast_enabled(device_type))
        torch.set_autocast_enabled(device_type, False)

        # A closure returns the loss of this worker's images. The optimizer gets a closure that returns the loss of the
        # global batch instead, in the same place: as the first argument, or by name.
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._joined_loss, args[1]), *args[2:]), options
        if callable(options.get("closure")):
            return args, {**options, "closure": partial(self._joined_loss, options["closure"])}
        return None

    def _check_in_checkpoints(self, optimizer: Optimizer) -> None:
        """Raise UsageError if checkpoints lack the state of ``optimizer``, or of a scheduler that it has."""
        if not self._state.holds(optimizer):
            raise UsageError(
                f"The loop steps a {type(optimizer).__name__} that no checkpoint would hold, so a resumed run would "
                "lose its state; give it to run.prepare before the first batch."
            )
        has_scheduler = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # torch marks the step of such an optimizer
        if has_scheduler and not self._state.holds_scheduler(optimizer):
            raise UsageError(
                "The optimizer has a scheduler that no checkpoint would hold, so a resumed run would begin it again; "
                "give it to run.prepare, too."
            )

    def _set_rising_rates(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rates of ``step`` in a search for one: that of the first group rises from step to step.

        The other groups keep the ratio to it with which they began. Raises UsageError if the first rate began at 0.
        """
        # A loop may add groups as it goes on, so the first rates of new ones are noted now.
        first_rates = self._first_rates.setdefault(optimizer, [])
        new_groups = optimizer.param_groups[len(first_rates) :]
        first_rates += [float(group.get("initial_lr", group["lr"])) for group in new_groups]
        if not first_rates[0]:
            raise UsageError("The first group of the optimizer starts with a learning rate of 0; start above 0.")
        rate = rising_rate(self._config, step, self._num_steps)
        for group, first_rate in zip(optimizer.param_groups, first_rates, strict=True):
            group["lr"] = rate * first_rate / first_rates[0]

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        """Note a step of ``optimizer``, and restore autocast; torch calls this after each step of each optimizer."""
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
        """Call ``closure``, and return the loss of the global batch in place of the loss of this worker's images.

        Optimizers such as LBFGS with a line search decide by it, so it must be the same on all workers. The networks in
        the closure compute with autocast as before the step.
        """
        # If the closure raises an error, such as one of memory, the step ends, and torch does not call _after: autocast
        # stays as it was before the step, for a loop that catches the error and computes on.
        torch.set_autocast_enabled(self._worker.device.type, self._autocast_before[-1])
        loss = closure()
        torch.set_autocast_enabled(self._worker.device.type, False)
        if not isinstance(loss, Tensor):
            return loss
        # The loss of a placeholder is left out, because 0 · NaN would be NaN.
        share = self._share()
        has_images = isinstance(share, Tensor) or share > 0
        joined = loss.detach() * share if has_images else torch.zeros_like(loss.detach())
        if self._worker.world_size > 1:
            dist.all_reduce(joined)
        return joined


class LateBackward:
    """Reports a backward that comes after the last batch of an epoch, and before the loop asks for the next epoch.

    It is late if no optimizer has stepped in the first batch of the epoch, and one has in the last: the loop gets each
    batch ahead of its step, as to read ahead itself. On one worker such a loop trains well, but a checkpoint between
    the two counts a batch of which the network has learned nothing. On several, ``Steps.share`` refuses its backward.
    """

    def __init__(self, models: PreparedModels, world_size: int, report: Callable[[str], None]) -> None:
        self._models, self._world_size, self._report = models, world_size, report
        self._first_has_step = False  # an optimizer has stepped in the first batch of the epoch
        self._last_has_step = False  # and in the last one so far
        self._hook: RemovableHandle | None = None  # called by the next backward

    def end_step(self, has_stepped: bool, *, is_first: bool) -> None:
        """Note whether an optimizer ``has_stepped`` in a batch, which may be the first one of an epoch or attempt."""
        self._last_has_step = has_stepped
        if is_first:
            self._first_has_step = has_stepped

    def watch(self) -> None:
        """Report the next backward, if it comes before :meth:`end_watch` and is late."""
        if self._world_size > 1 or self._first_has_step or not self._last_has_step:
            return
        weights = [weight for model in self._models.trained for weight in model.parameters() if weight.requires_grad]
        if weights:
            self._hook = register_multi_grad_hook(weights, lambda _: self._report(_LATE), mode="any")

    def end_watch(self) -> None:
        """Report no further backward."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
