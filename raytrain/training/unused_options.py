"""Options that a loop of the user's leaves unused, because it does not call what they are for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from raytrain.config import ResolvedConfig
from raytrain.errors import flag
from raytrain.recipes import RECIPES
from raytrain.training.run import Run

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


class OptionUse:
    """Knows which of a run's calls a loop has made, and so which options it leaves unused."""

    def __init__(self, run: Run) -> None:
        self._config = run.config
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
        if "loss" not in self._called and (mixing := _given(self._config, ("mixup", "cutmix"))):
            found.append(_MIXED.format(options=" and ".join(mixing)))
        return found

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._called.add(name)
        return function(*arguments, **options)


def _given(config: ResolvedConfig, names: tuple[str, ...]) -> list[str]:
    """The flags of those options that are not as the recipe has them."""
    recipe = RECIPES[config.recipe]()
    return [flag(name) for name in names if getattr(config, name) != getattr(recipe, name)]
