"""Checks and builds objects of ``torchmetrics`` by the names in options. Imports torch only to build them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from raytrain.config.extras import extra
from raytrain.config.user_code import describe
from raytrain.errors import UsageError, did_you_mean


class Torchmetric(NamedTuple):
    """A class of ``torchmetrics`` that an option names, and the text of its arguments."""

    name: str
    arguments: str


def torchmetrics_of(name: str) -> Torchmetric | None:
    """Return the class and arguments in ``torchmetrics:NAME`` or ``torchmetrics:NAME(arguments)``; None for others.

    Example: ``torchmetrics_of("torchmetrics:FBetaScore(beta=2.0)") == ("FBetaScore", "beta=2.0")``
    """
    found = re.fullmatch(r"torchmetrics:(\w+)(?:\((.*)\))?", name)
    return None if found is None else Torchmetric(found[1], found[2] or "")


def check_torchmetric(wanted: Torchmetric) -> None:
    """Raise UsageError if torchmetrics is not installed, or has no such class for classification."""
    package = importlib.util.find_spec("torchmetrics")
    if package is None:
        raise UsageError(
            f"--metrics torchmetrics:{wanted.name} needs torchmetrics, which is not installed; install "
            f"{extra('torchmetrics')}."
        )
    known = _classes_of_torchmetrics()
    if known and wanted.name not in known:
        raise UsageError(
            f"--metrics torchmetrics:{wanted.name} is no class of torchmetrics{did_you_mean(wanted.name, known)}; its "
            "documentation lists them, such as MulticlassCohenKappa."
        )


@cache
def _classes_of_torchmetrics() -> frozenset[str]:
    """Return the classes that torchmetrics lists in its files, without importing it, because it imports torch."""
    package = importlib.util.find_spec("torchmetrics")
    folders = (package and package.submodule_search_locations) or []
    files = [
        Path(folder, *place) for folder in folders for place in (["__init__.py"], ["classification", "__init__.py"])
    ]
    texts = [file.read_text("utf-8").partition("__all__")[2] for file in files if file.is_file()]
    return frozenset(name for text in texts for name in re.findall(r"\"([A-Z]\w+)\"", text))


def build_torchmetric(name: str, arguments: str, num_classes: int, *, multi_label: bool) -> Any:
    """Return an object of the class ``name`` of torchmetrics; ``arguments`` are as in Python, such as ``beta=2.0``.

    Arguments that follow from the run (task, num_classes, num_labels) are filled in. Raises UsageError if it fails.

    Example: ``build_torchmetric("MulticlassFBetaScore", "beta=2.0", 10, multi_label=False)``
    """
    written = f"torchmetrics:{name}" + (f"({arguments})" if arguments else "")
    modules = [importlib.import_module(module) for module in ("torchmetrics.classification", "torchmetrics")]
    metric_class = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if metric_class is None:
        raise UsageError(f"--metrics names {written}, and torchmetrics has no class {name}.")
    known = {
        "task": "multilabel" if multi_label else "multiclass",
        "num_classes": num_classes,
        "num_labels": num_classes,
    }
    try:
        call: Any = ast.parse(f"f({arguments})", mode="eval").body
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        # Its factories, such as torchmetrics.Accuracy, have the task as an argument of __new__.
        makers = metric_class.__init__, metric_class.__new__
        parameters = {name for maker in makers for name in inspect.signature(maker).parameters}
        values = [ast.literal_eval(value) for value in call.args]
        return metric_class(*values, **{name: value for name, value in known.items() if name in parameters} | given)
    except Exception as error:
        raise UsageError(f"--metrics {written} cannot be made ({describe(error)}); correct its arguments.") from error


@cache
def is_lower_better_to_torchmetrics(wanted: Torchmetric, multi_label: bool) -> bool:
    """Return whether a smaller value is better; raise UsageError if torchmetrics does not say so. Imports torch."""
    num_classes = 2 if wanted.name.startswith("Binary") else 6  # the answer does not depend on this number
    is_higher_better = build_torchmetric(*wanted, num_classes, multi_label=multi_label).higher_is_better
    if is_higher_better is None:
        raise UsageError(
            f"--best, --until and --patience cannot use {wanted.name}, of which torchmetrics does not say whether more "
            "of it is better; name another metric."
        )
    return not is_higher_better
