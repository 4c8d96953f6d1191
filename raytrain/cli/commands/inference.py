"""Commands that use the network of a run.

The network may be code of the user's, which prints what it likes: on standard error here, since a command's table, rows
or JSON are on standard output.
"""

from __future__ import annotations

import logging
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from tyro.conf import Positional, arg

import raytrain
from raytrain.cli.command import CommandResult, Flag, RunName, Storage, Trust
from raytrain.config.evaluation import TestView
from raytrain.errors import StorageError, UsageError, format_count
from raytrain.runs.documents import CONFUSION_PICTURE

Address = Annotated[str | None, arg(help="Ray cluster to use; by default one that runs already, or none.")]
_MAX_ROWS = 20  # predictions that are printed
Workers = Annotated[
    int | None, arg(help="Networks that share the work; by default one per GPU, or what fits a cluster.")
]
Threshold = Annotated[
    tuple[float, ...],
    arg(
        help="If an image may have several classes: the probability from which on it has a class, one for all or for "
        "each; by default those with the best F1."
    ),
]


@dataclass(frozen=True)
class PredictionOptions:
    """How ``evaluate`` and ``predict`` use the network."""

    threshold: Threshold = ()
    test_views: tuple[TestView, ...] = ()
    """Views of each image to average over: flip, shift; those that the run was trained with are always used."""
    storage: Storage = "./runs"
    workers: Workers = None
    address: Address = None
    trust: Trust = False


def evaluate(
    run: RunName,
    prediction: PredictionOptions,
    data: Annotated[
        str | None,
        arg(
            help="Labelled images: a folder or a URL; by default the run's own test images, else its validation images."
        ),
    ] = None,
    labels: Annotated[
        str | None,
        arg(
            help="Label file of the images; by default the run's --label-pattern, else metadata.csv or the like beside "
            "them, else their folders."
        ),
    ] = None,
    output: Annotated[
        str | None, arg(help="PNG file for the confusions; by default confusion.png in the run's folder.")
    ] = None,
) -> CommandResult:
    """Measure a run's best checkpoint on labelled images, each used exactly once: accuracy, per class, confusions.

    Without --data, they are the run's own test images, or, if it has none, its validation images. With it, the result
    says how many of them the run was trained on.

    Example: raytrain evaluate first
    """
    from raytrain.display.curves import save_png
    from raytrain.display.evaluation import confusion_figure, evaluation_page, label_evaluation_page
    from raytrain.inference.classification_metrics import LabelEvaluation
    from raytrain.storage.open import check_output

    picture = output or f"{prediction.storage.rstrip('/')}/{run}/{CONFUSION_PICTURE}"
    check_output(output, (".png",))
    with redirect_stdout(sys.stderr):
        result = raytrain.evaluate(run, data, labels=labels, **vars(prediction))
    if result.skipped and not result.images:
        raise UsageError(
            f"None of {format_count(result.skipped, 'image')} of {result.data} can be decoded; check the files."
        )

    # If images may have several classes, no class is taken for another, and there is no figure of confusions.
    if isinstance(result, LabelEvaluation):
        if output is not None:
            logging.getLogger("raytrain").warning("no %s: images of run %s may have several classes", output, run)
        return CommandResult(label_evaluation_page(result), result.summary())
    try:
        save_png(confusion_figure(result), picture)
    except StorageError as error:
        # A user who may only read the storage of the runs can still measure them.
        if output is not None:
            raise
        logging.getLogger("raytrain").warning("no picture of the confusions (--output names another place): %s", error)
        picture = None
    return CommandResult(evaluation_page(result, picture), {**result.summary(), "picture": picture})


def predict(
    run: RunName,
    prediction: PredictionOptions,
    files: Annotated[Positional[tuple[str, ...]], arg(help="Image files.")] = (),
    data: Annotated[str | None, arg(help="Images: a folder or a URL (s3://…, gs://…, az://…).")] = None,
    output: Annotated[
        str | None, arg(help="File to write: .parquet or .csv; by default the rows are printed, at most 20.")
    ] = None,
    top_k: Annotated[int, arg(help="Number of most likely classes to write per image.")] = 1,
    embeddings: Annotated[
        Flag, arg(help="Write what the body of the network gives to its head, too: a list of numbers in .parquet.")
    ] = False,
) -> CommandResult:
    """Classify image files (raytrain predict first photo.jpg), or all images below --data: one row per image.

    Example: raytrain predict first --data s3://bucket/new --output predictions.csv
    """
    from rich.console import Group

    from raytrain.display.console import format_value, headed_table, key_value_table

    if bool(files) == (data is not None):
        raise UsageError("Give either image files (raytrain predict RUN photo.jpg …) or a folder with --data.")
    if embeddings and output is None:
        raise UsageError("--embeddings are hundreds of numbers per image; give --output, a .parquet file.")
    with redirect_stdout(sys.stderr):
        result = raytrain.predict(run, data or files, output, top_k=top_k, embeddings=embeddings, **vars(prediction))
    summary = result.summary()
    if result.errors and result.errors == result.images:
        reason = f"{output} has the reasons" if output else summary["rows"][0]["error"]
        if len(files) == 1:
            raise UsageError(f"{files[0]} cannot be decoded ({reason}); check the files.")
        images = f"{format_count(result.images, 'image')} of {result.data}"
        raise UsageError(f"None of {images} can be decoded ({reason}); check the files.")

    # Without --output, the first rows are printed above the table of totals.
    totals = key_value_table(summary)
    if output:
        return CommandResult(totals, summary)
    rows = summary["rows"][:_MAX_ROWS]
    table = headed_table(list(rows[0]) if rows else [], [], [[*map(format_value, row.values())] for row in rows])
    return CommandResult(Group(table, "", totals), summary)


@dataclass(frozen=True)
class ServingOptions:
    """How ``serve`` answers."""

    storage: Storage = "./runs"
    host: Annotated[str, arg(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, arg(help="Port to listen on.")] = 8000
    workers: Annotated[int, arg(help="Copies of the network; each has a GPU of its own if there are any.")] = 1
    top_k: Annotated[int, arg(help="Number of most likely classes in an answer.")] = 5
    threshold: Threshold = ()
    address: Annotated[str | None, arg(help="Ray cluster to use; by default one that runs already, or a new one.")] = (
        None
    )
    trust: Trust = False


def serve(run: RunName, serving: ServingOptions) -> CommandResult:
    """Answer over HTTP with a run's best checkpoint, until Ctrl-C: POST an image file, and get its classes as JSON.

    Example: raytrain serve first
    """

    from raytrain.display.terminal import startup_lines

    def print_address(url: str) -> None:
        print(f"Serving at {url}, for example: curl --data-binary @IMAGE.jpg {url}", flush=True)

    with startup_lines(partial(print, file=sys.stderr, flush=True)):
        raytrain.serve(run, ready=print_address, **vars(serving))
    return CommandResult("", {"run": run, "host": serving.host, "port": serving.port})


def export(
    run: RunName,
    output: Annotated[
        str, arg(help="File to write: .pt2 (torch.export), .onnx, or weights as .safetensors; or a new folder.")
    ],
    format: Annotated[
        Literal["huggingface"] | None,
        arg(help="huggingface: a folder that timm loads and Hugging Face's Hub shows, for networks of timm."),
    ] = None,
    data: Annotated[str | None, arg(help="Images to check the file on; by default random pixels.")] = None,
    storage: Storage = "./runs",
    trust: Trust = False,
) -> CommandResult:
    """Write a run's network into one file, and check the file: a program with its preprocessing, which works without
    raytrain, or weights with a model card.

    Example: raytrain export first --output first.onnx
    """
    from rich.console import Group
    from rich.text import Text

    from raytrain.display.console import key_value_table

    with redirect_stdout(sys.stderr):
        document = raytrain.export(run, output, format=format, data=data, storage=storage, trust=trust).summary()
    # Below the table stands code that uses the file. People copy it, so the terminal must not wrap its lines.
    title = "With raytrain.models alone" if "from raytrain.models import" in document["example"] else "Without raytrain"
    example = Text(f"\n{title}:\n\n{document['example']}", no_wrap=True, overflow="ignore")
    return CommandResult(Group(key_value_table({**document, "example": None}), example), document)
