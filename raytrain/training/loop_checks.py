"""Checks of a loop: its loss is a sum over images that does not depend on who computes it, and it uses its options.

The graph of the loss tells whether it is a sum over images, and whether it compares them with each other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from raytrain.config import ResolvedConfig
from raytrain.data.plan.permutation import mix
from raytrain.errors import UsageError, flag
from raytrain.recipes import RECIPES
from raytrain.training.batchnorm import ConvertedBatchNorm
from raytrain.training.gradients import check_not_wrapped
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.random_numbers import used_generators

if TYPE_CHECKING:
    from raytrain.training.run import Run

_OF_WEIGHTS = (
    "a term of the loss depends on weights alone, such as a penalty; unless batch.num_used multiplies it, run.backward "
    "adds it once for each worker, and divides it by the images of the global batch: write batch.num_used * (the term)"
)
_COMPARES = (
    "the loss compares the images of a worker with each other (by a statistic over them, or by products of their "
    "features), so it depends on the number of workers; gather the rows of all of them, as contrastive learning does "
    "in docs/your-own-loop.md, or train on one worker"
)
_MEAN = 1  # torch's number for reduction="mean"
_MOST_PARTS = 4  # a loss may well be divided by a number of terms or parts that is as small
_LOOK_UP = ("Index", "Embedding", "Gather")  # torch's names of what takes rows of weights by what an image says
_STATISTICS = ("Mean", "Var", "Std", "Amax", "Amin", "Max", "Min", "Median", "Topk", "Sort", "Log", "Softmax")
_OF_PAIRS = ("Mm", "Cdist", "Sub", "Add", "Mul")
_ONE_BY_ONE = ("Add", "Sub", "Rsub", "Mul", "Div")
_ADDS = ("AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0", "StackBackward0")


_USED_BY = {
    "build_model": ("model", "weights", "freeze"),
    "build_optimizer": (
        *("optimizer", "momentum", "nesterov", "weight_decay", "decay_norms_and_biases"),
        *("head_learning_rate_factor", "layer_decay"),
    ),
    "loss": ("label_smoothing", "class_weights", "focal_gamma"),
    "parts": ("accumulate",),
}
"""The call of a run that uses each of these options; all others take effect in every loop."""
_MIXED = (
    "{options}: the classes of mixed images are in batch.targets, not in batch.labels; the loop does not call "
    "run.loss, so its own loss has to take them"
)


_DRAWS = (
    "the loop or its network draws random numbers from {names}: each worker draws its own, so that the run depends on "
    "the number of workers; docs/images.md names the layers with which it does not"
)


class LoopChecks:
    """The checks of a start of a run; ``tell`` gets a note for whoever watches it."""

    def __init__(self, models: PreparedModels, tell: Callable[[str], None], *, batch_size: int, joins: bool) -> None:
        self._models, self._tell = models, tell
        self._batch_size = batch_size  # of the global batch
        self._joins = joins  # there are several workers, and their batch norm is joined
        self._is_first = True
        self._others: dict[Any, Tensor] = {}

    def backward(self, loss: Tensor, num_images: int, num_steps: int, *, gathers: bool) -> None:
        """The loop backpropagates the ``loss`` of ``num_images`` images after ``num_steps`` steps.

        It is checked in the first steps, and more and more rarely. Raises UsageError if it is no sum, if torch joins
        its gradients, or if there is batch norm that is not joined.

        Args:
            gathers: the loop has gathered rows of all workers.
        """
        if not isinstance(loss, Tensor):
            raise UsageError(f"run.backward got a {type(loss).__name__}; give it the loss, a tensor.")
        if num_steps & (num_steps - 1) == 0 and _check_sum(loss, num_images, self._batch_size):
            self._tell(_OF_WEIGHTS)
        if num_steps == 0 and self._joins and not gathers and _compares_images(loss, num_images):
            self._tell(_COMPARES)
        if self._is_first:
            check_not_wrapped(self._models.parameters())
            self._others = _batches_of_others() if self._joins else {}
        elif num_steps > 0 and self._others:
            _check_others(self._others)
            self._others = {}
        self._is_first = False

    def log(self, sums: Mapping[str, Tensor | float], num_images: int, num_steps: int) -> None:
        """The loop logs ``sums`` over ``num_images`` images. Raises UsageError if a graph tells that one is a mean."""
        for name, value in sums.items() if num_steps & (num_steps - 1) == 0 else ():
            if (
                isinstance(value, Tensor)
                and value.grad_fn is not None
                and _has_mean(value, num_images, self._batch_size)
            ):
                raise UsageError(
                    f"run.log({name}=...) got a mean over the images; give it a sum: the history divides it by the "
                    "images of all workers itself."
                )


class OptionUse:
    """Knows which of a run's calls a loop has made, and so which options it leaves unused."""

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config
        self._called: set[str] = set()
        for call in _USED_BY:
            setattr(run, call, partial(self._call, call, getattr(run, call)))

    def notes(self) -> list[str]:
        """A sentence for each call that the loop has not made and that an option, not its recipe's, is for."""
        found: list[str] = []
        for call, names in _USED_BY.items():
            options = _given(self._config, names)
            if options and call not in self._called:
                takes = "takes" if len(options) == 1 else "take"
                found.append(f"{', '.join(options)} {takes} effect in run.{call}, which the loop does not call")
        if "build_optimizer" not in self._called:
            found += self._rate_is_unused()
        if "loss" not in self._called and (mixing := _given(self._config, ("mixup", "cutmix"))):
            found.append(_MIXED.format(options=" and ".join(mixing)))
        return found

    def _rate_is_unused(self) -> Iterator[str]:
        """A sentence if a run that begins got a learning rate that none of the loop's own optimizers begins with."""
        recipe = RECIPES[self._config.recipe]().scaled_to(self._run.world_size)
        rate, own = self._config.learning_rate, sorted(set(self._run.rates.initial))
        is_first = self._run.progress.step == 1 and not self._config.is_range_test
        if own and is_first and rate not in (recipe.learning_rate, *own):
            begun = ", ".join(f"{each:g}" for each in own)
            yield (
                f"--learning-rate {rate:g}: the optimizers of the loop begin with {begun}, so it takes effect only if "
                "the loop itself reads run.config.learning_rate"
            )

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._called.add(name)
        return function(*arguments, **options)


def drawn_by_loop(run: Run) -> list[str]:
    """A sentence if the loop or its network has drawn random numbers of one worker's own in the step that has ended."""
    if run.world_size == 1:
        return []
    drawn = used_generators(mix(run.config.seed, run.progress.step - 1, run.rank), run.device)
    return [_DRAWS.format(names=" and ".join(drawn))] if drawn else []


def _given(config: ResolvedConfig, names: tuple[str, ...]) -> list[str]:
    """The flags of those options that are not as the recipe has them."""
    recipe = RECIPES[config.recipe]()
    return [flag(name) for name in names if getattr(config, name) != getattr(recipe, name)]


def _batches_of_others() -> dict[Any, Tensor]:
    """Batch norm layers that belong to no prepared network, with how many batches each has learned from, () int64."""
    layers = [each for each in gc.get_objects() if issubclass(type(each), _BatchNorm)]
    plain = [each for each in layers if not isinstance(each, ConvertedBatchNorm) and each.track_running_stats]
    return {each: each.num_batches_tracked.clone() for each in plain}


def _check_others(before: dict[Any, Tensor]) -> None:
    """Raise UsageError if one of the layers has learned since ``before``: from one worker's images."""
    if any(bool(layer.num_batches_tracked != number) for layer, number in before.items()):
        raise UsageError(
            "A network that is not prepared has batch norm in training mode, which normalises with one worker's "
            "images: give it to run.prepare, or call its eval() if it is to stay as it is; or train on one worker."
        )


def _check_sum(loss: Tensor, num_images: int, batch_size: int) -> bool:
    """Raise UsageError unless ``loss`` is a sum over ``num_images`` images.

    Return whether a term of it depends on weights alone, and is not multiplied by the number of images.
    """
    if loss.numel() != 1:
        raise UsageError(
            f"run.backward got a loss of shape {tuple(loss.shape)}; give it one number, the sum over the images."
        )
    if loss.grad_fn is None:
        raise UsageError(
            "run.backward got a loss without a gradient; compute it from the output of a prepared network."
        )
    if _has_mean(loss, num_images, batch_size):
        raise UsageError(
            'run.backward got a mean over the images; give it a sum (reduction="sum"): it divides by the images of '
            "the whole global batch itself, which no worker's mean does. A term that is a mean becomes a sum by "
            "batch.num_used * (the term)."
        )
    return num_images > 0 and any(
        is_term and not factors & {num_images, 0} and _is_of_weights(node)
        for node, factors, is_term in _scalars(loss.grad_fn)
    )


def _has_mean(value: Tensor, num_images: int, batch_size: int) -> bool:
    """Whether some term is a mean over the images: of this worker, or of a global batch of ``batch_size``."""
    try:
        for node, factors, _ in _scalars(value.grad_fn) if num_images else ():
            if node.name().startswith("DivBackward"):
                divisor = _number(node)
                num_rows = divisor if divisor in (num_images, batch_size) and divisor > _MOST_PARTS else 0
            else:
                num_rows = _rows_of_mean(node, num_images, is_whole=node is value.grad_fn)
            if num_rows and not factors & {num_rows, num_images}:
                return True
    except RuntimeError:  # a backward has used it up, which was checked then
        pass
    return False


def _compares_images(loss: Tensor, num_images: int) -> bool:
    """Whether some node of the graph of ``loss``, whatever its place, joins numbers of different images.

    It is told by shapes, so that a batch of one image tells nothing.
    """
    return num_images > 1 and any(_compares(node, num_images) for node in _all_nodes(loss.grad_fn))


def _compares(node: Any, num_images: int) -> bool:
    name, inputs = node.name(), [child for child, _ in node.next_functions if child is not None]
    shapes = [_shape(child, index) for child, index in node.next_functions if child is not None]
    if name.startswith(_STATISTICS) and hasattr(node, "_saved_dim") and shapes and shapes[0]:
        dims = node._saved_dim if isinstance(node._saved_dim, tuple) else (node._saved_dim,)
        first = {0, -len(shapes[0]), 2**64 - len(shapes[0])}  # torch shows what is negative without its sign
        is_of_views = inputs[0].name() == "StackBackward0"
        is_found = not is_of_views and shapes[0][0] % num_images == 0 and not first.isdisjoint(dims)
    elif name.startswith(("NativeBatchNorm", "CudnnBatchNorm")):
        is_found = bool(node._saved_training) and shapes[0][0] == num_images
    elif name.startswith(_OF_PAIRS) and len(shapes) == 2:
        own = _shape(node)
        is_product = len(own) == 2 and name.startswith("Mm") and shapes[0][1] % num_images == 0
        is_found = is_product or (own[:2] not in (shapes[0][:2], shapes[1][:2]) and _are_pairs(own, num_images))
    else:
        return False
    return is_found and not any(map(_is_of_weights, inputs))


def _are_pairs(shape: tuple[int, ...], num_images: int) -> bool:
    return len(shape) > 1 and shape[0] % num_images == 0 and shape[1] % num_images == 0


def _shape(node: Any, index: int = 0) -> tuple[int, ...]:
    return tuple(node._input_metadata[index].shape)


def _all_nodes(root: Any) -> Iterator[Any]:
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        yield node
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        waiting += new


def _scalars(root: Any) -> Iterator[tuple[Any, frozenset[float], bool]]:
    """The nodes from a loss to the tensors that it is made of, with the numbers that multiply each.

    The last value tells the terms that are added up, in which a node is not divided further.
    """
    waiting, seen = [(root, frozenset[float](), True)], {root}
    while waiting:
        node, factors, is_added = waiting.pop()
        children = [child for child, _ in node.next_functions if child is not None and child not in seen]
        scalars = [child for child in children if _is_scalar(child) or child.name() == "StackBackward0"]
        number = _number(node)
        is_split = bool(scalars) and (node.name() in (*_ADDS, "SumBackward0") or number is not None)
        if number is not None and node.name().startswith("Mul"):
            factors = factors | {number}
        yield node, factors, is_added and not is_split
        seen.update(scalars)
        waiting += [(child, factors, is_added and is_split) for child in scalars]


def _is_scalar(node: Any) -> bool:
    return len(node._input_metadata) == 1 and _shape(node) == ()


def _number(node: Any) -> float | None:
    """By which constant a node multiplies or divides, if it does, and the host knows it."""
    if not node.name().startswith(("MulBackward", "DivBackward")):
        return None
    for each in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(each, Tensor) and each.ndim == 0 and each.is_cpu and not each.requires_grad:
            return each.item()
        if isinstance(each, (int, float)):
            return each
    return None


def _rows_of_mean(node: Any, num_images: int, *, is_whole: bool) -> float:
    """Over how many rows a node is a mean; 0 if it is none, or one of something else, such as pixels."""
    if node.name().startswith("MeanBackward"):
        sizes = node._saved_self_sym_sizes
        if node.next_functions[0][0].name() == "StackBackward0" and not _MOST_PARTS < sizes[0] == num_images:
            return 0  # of terms
    elif getattr(node, "_saved_reduction", None) == _MEAN:
        sizes = _shape(*node.next_functions[0])
    else:
        return 0
    num_rows = sizes[0] if sizes else 1
    is_of_images = num_rows > 1 and (num_rows % num_images == 0 or node.name().startswith("NllLoss"))
    return num_rows if is_whole or is_of_images else 0


def _is_of_weights(term: Any) -> bool:
    """Whether nothing but weights is in it: nothing that torch does not show, and of tensors without a gradient only
    those of a weight's shape, such as what it was before.
    """
    return all(map(_keeps_to_weights, _all_nodes(term)))


def _keeps_to_weights(node: Any) -> bool:
    name = node.name()
    if name.endswith("AccumulateGrad"):
        return isinstance(node.variable, nn.Parameter)
    if not name[-1].isdigit() or name.startswith(_LOOK_UP):
        return False
    inputs = [each for each in node.next_functions if each[0] is not None]
    is_constant = _is_scalar(node) or (name.startswith(_ONE_BY_ONE) and _shape(node) == _shape(*inputs[0]))
    return len(inputs) == len(node.next_functions) or is_constant
