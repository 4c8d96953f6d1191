"""Options of the built-in loop that a loop of the user's own leaves unused, found by the names in its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from raytrain.config.options import options_by_call
from raytrain.config.user_code import is_of_user, variables_of
from raytrain.errors import flag
from raytrain.recipes import RECIPES

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
    """Yield a sentence for each call that ``loop`` lacks, if an option that it takes is not its recipe's."""
    config, recipe = run.config, RECIPES[run.config.recipe]().scaled_to(run.world_size)
    options = [option.name for option in fields(recipe)]
    changed = {name for name in options if getattr(config, name) != getattr(recipe, name)}
    names = names_in_code(loop)

    # An option takes effect in its call, or where the loop reads run.config.NAME. A search for a learning rate decides
    # the schedule itself, and a loop that was given no learning rate has one of its own.
    decided = {"schedule", "learning_rate"} if config.is_range_test else set[str]()
    if not config.learning_rate:
        decided.add("learning_rate")
    for call, taken in options_by_call().items():
        if call.rpartition(".")[2] in names:
            continue
        unused = [name for name in taken if name in changed - names - decided]
        if unused:
            flags, takes = ", ".join(map(flag, unused)), "takes" if len(unused) == 1 else "take"
            yield f"{flags} {takes} effect in {call}, which the loop does not call"

    # These two take effect in every loop, but a loss must know of them.
    mixing = [name for name in ("mixup", "cutmix") if name in changed]
    if mixing and not {"loss", "targets"} & names:
        yield _MIXED.format(options=" and ".join(map(flag, mixing)))
    if config.precision == "float16" and "GradScaler" not in names:
        yield _NOT_SCALED


def names_in_code(function: Any) -> set[str]:
    """Return the names in the code of ``function`` and of the user's functions and classes that it refers to.

    Example::

        names_in_code(lambda run: run.build_model())  # {"build_model"}
    """
    names: set[str] = set()
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # which also keeps its ID from being given to another one
        if isinstance(thing, CodeType):
            names.update(thing.co_names)
            waiting += [constant for constant in thing.co_consts if isinstance(constant, CodeType)]
        elif isinstance(thing, FunctionType) and is_of_user(thing.__code__.co_filename):
            of_module, of_closure = variables_of(thing)
            waiting += [thing.__code__, *of_module.values(), *of_closure.values()]
        elif isinstance(thing, MethodType):
            waiting += [thing.__func__, type(thing.__self__)]
        elif isinstance(thing, partial):
            waiting += [thing.func, *thing.args]  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(thing, type):
            waiting += [value for value in vars(thing).values() if isinstance(value, (FunctionType, type))]
        elif callable(thing) and not isinstance(thing, FunctionType):
            waiting.append(type(thing))
    return names
