"""Whether there is a network of some name, as far as that can be told without torch, whose import takes seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from raytrain.config.user_function import check_module
from raytrain.errors import UsageError, did_you_mean

_REGISTERED = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


def check_model_name(name: str) -> None:
    """Raise UsageError if there is no network called ``name``; what only torch can tell is found out later."""
    if ":" in name:
        check_module("--model", name)
    elif (known := _torchvision_classifiers()) and name not in known:
        raise unknown_classifier(name, known)


def unknown_classifier(name: str, known: Iterable[str]) -> UsageError:
    """The error for a ``name`` that is none of torchvision's."""
    return UsageError(
        f"--model {name} is no classifier of torchvision{did_you_mean(name, known)}; give your own as "
        "package.module:function."
    )


def _torchvision_classifiers() -> list[str]:
    """The names of the functions that torchvision's files register; empty if they are written in another way."""
    package = importlib.util.find_spec("torchvision")
    folders = (package and package.submodule_search_locations) or []
    return [name for folder in folders for file in Path(folder, "models").glob("*.py") for name in _registered(file)]


def _registered(file: Path) -> list[str]:
    return _REGISTERED.findall(file.read_text())
