"""Checks and builds objects of ``torchmetrics`` by the names in options. Imports torch only to build them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from raytrain.config.extras import require_package
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
    match = re.fullmatch(r"torchmetrics:(\w+)(?:\((.*)\))?", name)
    return None if match is None else Torchmetric(match[1], match[2] or "")


def check_torchmetric(metric: Torchmetric) -> None:
    """Raise UsageError if torchmetrics is not installed, or does not list the class of ``metric``.

    Its arguments are not checked. Imports neither torchmetrics nor torch.
    """
    require_package(f"--metrics torchmetrics:{metric.name}", "torchmetrics", "torchmetrics")
    classes = _classes_of_torchmetrics()
    if classes and metric.name not in classes:  # none: another version, whose files list them elsewhere
        raise UsageError(
            f"--metrics torchmetrics:{metric.name} is no class of torchmetrics{did_you_mean(metric.name, classes)}; "
            "its documentation lists them, such as MulticlassCohenKappa."
        )


@cache
def _classes_of_torchmetrics() -> frozenset[str]:
    """Return the names of the classes that torchmetrics lists in ``__all__`` of two files; none if it lists none there.

    The files are read, because an import would import torch.
    """
    package = importlib.util.find_spec("torchmetrics")
    folders = (package and package.submodule_search_locations) or []
    names = "__init__.py", "classification/__init__.py"
    files = [Path(folder, name) for folder in folders for name in names]
    texts = [file.read_text("utf-8").partition("__all__")[2] for file in files if file.is_file()]
    return frozenset(name for text in texts for name in re.findall(r"\"([A-Z]\w+)\"", text))


def build_torchmetric(name: str, arguments: str, num_classes: int, *, multi_label: bool) -> Any:
    """Return an object of the class ``name`` of torchmetrics; ``arguments`` are as in Python, such as ``beta=2.0``.

    Arguments that follow from the run (task, num_classes, num_labels) are filled in if the class has them and they
    are not given. Raises UsageError if there is no such class, or if it cannot be made.

    Example: ``build_torchmetric("MulticlassFBetaScore", "beta=2.0", 10, multi_label=False)``
    """
    written = f"torchmetrics:{name}" + (f"({arguments})" if arguments else "")
    modules = [importlib.import_module(module) for module in ("torchmetrics.classification", "torchmetrics")]
    metric_class = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if metric_class is None:
        raise UsageError(f"--metrics names {written}, and torchmetrics has no class {name}.")
    from_run = {
        "task": "multilabel" if multi_label else "multiclass",
        "num_classes": num_classes,
        "num_labels": num_classes,
    }
    try:
        # Read the arguments, which may only be literals, as those of the call of a function.
        call: Any = ast.parse(f"f({arguments})", mode="eval").body
        positional = [ast.literal_eval(value) for value in call.args]
        by_keyword = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        # Add those that follow from the run, if the class has them. Factories of torchmetrics, such as
        # torchmetrics.Accuracy, have the task as an argument of __new__.
        makers = metric_class.__init__, metric_class.__new__
        parameters = {parameter for maker in makers for parameter in inspect.signature(maker).parameters}
        filled_in = {parameter: value for parameter, value in from_run.items() if parameter in parameters}
        return metric_class(*positional, **filled_in | by_keyword)
    except Exception as error:
        raise UsageError(f"--metrics {written} cannot be made ({describe(error)}); correct its arguments.") from error


@cache
def is_lower_better_to_torchmetrics(metric: Torchmetric, multi_label: bool) -> bool:
    """Return whether a smaller value of ``metric`` is better. Imports torch.

    Raises UsageError if torchmetrics does not say whether it is, or if the metric cannot be made.
    """
    num_classes = 2 if metric.name.startswith("Binary") else 6  # the answer does not depend on this number
    is_higher_better = build_torchmetric(*metric, num_classes, multi_label=multi_label).higher_is_better
    if is_higher_better is None:
        raise UsageError(
            f"--best, --until and --patience cannot use {metric.name}, of which torchmetrics does not say whether more "
            "of it is better; name another metric."
        )
    return not is_higher_better
