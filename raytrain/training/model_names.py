"""Checks names of networks and optimizers without torch, whose import takes seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from raytrain.config.extras import require_package
from raytrain.config.named_functions import check_module
from raytrain.config.network import timm_name
from raytrain.errors import UsageError, did_you_mean

# How torchvision and timm write the function of a network in their files.
_REGISTERED = re.compile(r"^@register_model(?:\(\))?\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


def check_model_name(name: str) -> None:
    """Raise UsageError if there is surely no network called ``name``; only building it finds all mistakes.

    The names of timm's and torchvision's networks are read from their files. For a user's function, its file or package
    must exist. A network of timm is refused, too, if timm is not installed.

    Example: ``check_model_name("resnet18")``
    """
    in_timm = timm_name(name)
    if in_timm is not None:
        require_package(f"--model timm:{in_timm}", "timm", "timm")
        known = _classifiers_of("timm")
        if known and in_timm.partition(".")[0] not in known:
            raise unknown_timm_model(in_timm, known)
    elif ":" in name:
        check_module("--model", name)
    elif (known := _classifiers_of("torchvision")) and name not in known:
        raise unknown_classifier(name, known)


def is_network(name: str) -> bool:
    """Return True if ``name`` is that of a network of torchvision, or begins as one of timm's does.

    Example: ``is_network("resnet18") and is_network("timm:vit_tiny_patch16_224")``
    """
    return timm_name(name) is not None or name in _classifiers_of("torchvision")


@cache
def _classifiers_of(library: str) -> list[str]:
    """Return the names of the networks that a library's files register; empty if they register them in another way."""
    # Neither library is imported: both import torch.
    package = importlib.util.find_spec(library)
    folders = (package and package.submodule_search_locations) or []
    files = [file for folder in folders for file in Path(folder, "models").glob("*.py")]
    return [name for file in files for name in _REGISTERED.findall(file.read_text("utf-8"))]


def check_optimizer_name(name: str) -> None:
    """Raise UsageError if the optimizer ``name`` is one of timm's, and timm is not installed."""
    if name in ("lamb", "lion"):
        require_package(f"--optimizer {name}", "timm", "timm")


def unknown_classifier(name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a ``name`` that is not among torchvision's classifiers, which are ``known``."""
    return UsageError(
        f"--model {name} is no classifier of torchvision{did_you_mean(name, known)}; give your own as "
        "file.py:function or package.module:function, or one of timm's as timm:NAME."
    )


def unknown_timm_model(name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a ``name`` that is not among timm's networks, which are ``known``."""
    architecture = name.partition(".")[0]
    return UsageError(
        f"--model timm:{name} is no network of timm{did_you_mean(architecture, known)}; timm.list_models() in Python "
        "lists them."
    )
