"""Finds options of the built-in loop that the user's own loop does not use, by the names in its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from raytrain.config.options import options_by_call
from raytrain.errors import flag
from raytrain.recipes import RECIPES
from raytrain.training.loop_checks.reached_code import own_code

if TYPE_CHECKING:
    from raytrain.training.run import Run

_MIXED = (
    "{options}: the classes of mixed images are in batch.targets, not in batch.labels; the loop does not call "
    "run.loss, so its own loss has to take them"
)
_NOT_SCALED = (
    "--precision float16: small gradients become 0 without torch.amp.GradScaler, which the loop does not use; "
    "docs/your-own-loop.md shows one, and bfloat16 needs none"
)


def unused_options(run: Run, loop: Callable[..., Any]) -> Iterator[str]:
    """Yield sentences about options that the user has changed and ``loop`` does not handle, after its first step.

    Changed are options with other values than the recipe's. One has no effect if the loop lacks the call that takes it.
    Mixed images and float16 always have an effect, but need a loss or a gradient scaler that fits.
    """
    # Find out which options the user has changed.
    config, of_recipe = run.config, RECIPES[run.config.recipe]()
    recipe = of_recipe.scaled_to(run.world_size)
    options = [option.name for option in fields(recipe)]
    changed = {name for name in options if getattr(config, name) != getattr(recipe, name)}
    # A recipe's rate such as "0.01/worker" was multiplied by the number of workers when the run began. A resume, also
    # of a run that had made no step, may have another number of workers, so accept the rate for any whole number.
    if (config.resume or run.progress.step > 1) and isinstance(of_recipe.learning_rate, str):
        num_workers = config.learning_rate / cast("float", of_recipe.scaled_to(1).learning_rate)
        if abs(num_workers - round(num_workers)) < 1e-9:
            changed.discard("learning_rate")

    for call, without_effect in options_without_effect(run, loop).items():
        if unused := [name for name in without_effect if name in changed]:
            flags, takes = ", ".join(map(flag, unused)), "takes" if len(unused) == 1 else "take"
            yield f"{flags} {takes} effect in {call}, which the loop does not call"

    # Mixed images and float16 take effect in every loop, but its loss or its optimizer must handle them.
    names = names_in_code(loop)
    mixing = [name for name in ("mixup", "cutmix") if name in changed]
    if mixing and not {"loss", "targets"} & names:
        yield _MIXED.format(options=" and ".join(map(flag, mixing)))
    if config.precision == "float16" and "GradScaler" not in names:
        yield _NOT_SCALED


def options_without_effect(run: Run, loop: Callable[..., Any]) -> dict[str, list[str]]:
    """Return the names of options that have no effect in ``loop``, by the missing call that would take them.

    Example: ``{"run.build_optimizer": ["momentum", …]}`` for a loop that makes its optimizer itself
    """
    # An option takes effect in its call, or where the loop reads run.config.NAME. A search for a learning rate sets the
    # schedule itself, and a loop for which no learning rate was given has one of its own.
    config, names = run.config, names_in_code(loop)
    decided_elsewhere = {"schedule", "learning_rate"} if config.is_range_test else set[str]()
    if not config.learning_rate:
        decided_elsewhere.add("learning_rate")
    return {
        call: [option for option in options if option not in names | decided_elsewhere]
        for call, options in options_by_call().items()
        if call.rpartition(".")[2] not in names
    }


def names_in_code(function: Any) -> set[str]:
    """Return the global and attribute names in the code of ``function`` and of the user's functions that it calls.

    Example::

        names_in_code(lambda run: run.build_model())  # {"build_model"}
    """
    return {name for code, _ in own_code(function) for name in code.co_names}
