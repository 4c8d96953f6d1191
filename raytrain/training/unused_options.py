"""Options of the built-in loop that a loop of the user's own leaves unused, found by the names in its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from raytrain.config import ResolvedConfig
from raytrain.config.user_code import is_of_user, variables_of
from raytrain.errors import flag
from raytrain.recipes import RECIPES

if TYPE_CHECKING:
    from raytrain.training.run import Run

_TAKEN_BY = {
    "run.build_model": ("model", "weights", "freeze"),
    "run.build_optimizer": (
        *("optimizer", "learning_rate", "momentum", "nesterov", "weight_decay", "decay_norms_and_biases"),
        *("head_learning_rate_factor", "layer_decay"),
    ),
    "run.build_scheduler": ("schedule", "warmup_epochs"),
    "run.loss": ("label_smoothing", "class_weights", "focal_gamma"),
    "batch.microbatches": ("accumulate",),
    "WeightAverage": ("ema_decay",),
    "clip_grad_norm_": ("clip_norm",),
}
"""The call with which a loop uses these options. All other options take effect in every loop."""
_MIXED = (
    "{options}: the classes of mixed images are in batch.targets, not in batch.labels; the loop does not call "
    "run.loss, so its own loss has to take them"
)
_NOT_SCALED = (
    "--precision float16: small gradients become 0 without torch.amp.GradScaler, which the loop does not use; "
    "docs/your-own-loop.md shows one, and bfloat16 needs none"
)


def unused_options(run: Run, loop: Callable[..., Any]) -> Iterator[str]:
    """Yield a sentence for each call that ``loop`` lacks, if an option that it takes is not its recipe's."""
    names = names_in_code(loop)
    recipe = RECIPES[run.config.recipe]().scaled_to(run.world_size)
    for call, options in _TAKEN_BY.items():
        unused = [] if call.rpartition(".")[2] in names else _changed(run.config, recipe, options)
        unused = [name for name in unused if name not in names]  # the loop reads run.config.NAME
        if not run.config.learning_rate:  # of a loop that was given none
            unused = [name for name in unused if name != "learning_rate"]
        if run.config.is_range_test:
            unused = [name for name in unused if name not in ("schedule", "learning_rate")]
        if unused:
            given, takes = ", ".join(map(flag, unused)), "takes" if len(unused) == 1 else "take"
            yield f"{given} {takes} effect in {call}, which the loop does not call"
    mixing = _changed(run.config, recipe, ("mixup", "cutmix"))
    if mixing and not {"loss", "targets"} & names:
        yield _MIXED.format(options=" and ".join(map(flag, mixing)))
    if run.config.precision == "float16" and "GradScaler" not in names:
        yield _NOT_SCALED


def _changed(config: ResolvedConfig, recipe: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(config, name) != getattr(recipe, name)]


def names_in_code(function: Any) -> set[str]:
    """Return the names in the code of ``function`` and of the user's functions and classes that it refers to."""
    names: set[str] = set()
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, CodeType):
            names.update(each.co_names)
            waiting += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
        elif isinstance(each, FunctionType) and is_of_user(each.__code__.co_filename):
            of_module, of_closure = variables_of(each)
            waiting += [each.__code__, *of_module.values(), *of_closure.values()]
        elif isinstance(each, MethodType):
            waiting += [each.__func__, type(each.__self__)]
        elif isinstance(each, partial):
            waiting += [each.func, *each.args]  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(each, type):
            waiting += [value for value in vars(each).values() if isinstance(value, (FunctionType, type))]
        elif callable(each) and not isinstance(each, FunctionType):
            waiting.append(type(each))
    return names
