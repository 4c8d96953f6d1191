"""Export a trained network to one file that needs no raytrain: as a program or as weights with a model card."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from raytrain.config.extras import extra
from raytrain.config.option_values import Location
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.fetch_and_decode import readable_images
from raytrain.data.labels.manifest import list_images
from raytrain.errors import RaytrainError, UsageError
from raytrain.inference.classifier import Classifier, load
from raytrain.inference.huggingface_folder import (
    CARD,
    CONFIG,
    WEIGHTS,
    check_new_folder,
    lines_with_timm,
    write_network,
)
from raytrain.inference.model_card import example, model_card, network_lines, preprocessing
from raytrain.runs.documents import open_run, plain, read_resolved_config, read_trusted_config
from raytrain.runs.stored_checkpoints import require_checkpoint
from raytrain.storage.open import check_output, open_store, write_output
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.weights_source import SUFFIX, from_safetensors, to_safetensors

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Logits = npt.NDArray[np.floating[Any]]
RunFile = Callable[[Pixels], Logits]
"""Runs an exported network: decoded images, uint8 (B, H, W, C), to logits, (B, num_classes)."""

_NUM_CHECK_IMAGES = 64
_TOLERANCE = 1e-3  # of the largest logit: the order of sums differs, and float32 has seven digits


@dataclass(frozen=True)
class ExportResult:
    """The file that :func:`export` wrote, and how its network compares with the original one."""

    run: str
    checkpoint: str
    output: str
    size_bytes: int
    input: str  # what the file takes, in words
    result: str  # what it returns, in words
    classes: tuple[str, ...]
    images: int  # images that the file was compared on
    same_answers: int  # how many of these have the same predicted class
    largest_difference: float  # largest difference of a logit
    card: str | None = None  # the model card beside weights
    upload: str | None = None  # the command that uploads a folder to the Hub; a bucket has to be copied first
    example: str = ""  # lines of Python that use the file without raytrain

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return plain(self)


def export(
    run: str,
    output: Location,
    *,
    format: Literal["huggingface"] | None = None,
    data: Location | None = None,
    storage: Location = "./runs",
    trust: bool = False,
) -> ExportResult:
    """Write the network of a run's best checkpoint to a file that can be used without raytrain.

    Weights (.safetensors) are written with a model card beside them, of the same name in .card.md: it has the classes,
    the preprocessing, the data's digest, the metrics, the command, and lines that use them. Their metadata contain the
    classes as JSON under ``classes``. Weights of a network that raytrain has itself, such as that of the recipe digits,
    need the module ``raytrain.models``.

    Other files are programs, preprocessing included. Such a file takes the same input as the network of
    :func:`raytrain.load`: any number of decoded images, uint8 (B, H, W, C). It returns the same logits,
    (B, num_classes). It contains the names of the classes, and size, resizing, mean and standard deviation, as JSON: in
    ONNX's metadata under ``classes`` and ``preprocessing``, in torch.export's extra files ``classes.json`` and
    ``preprocessing.json``. The result's ``example`` are the lines that use it with Pillow and NumPy.

    With the ``format`` huggingface, the output is a new folder that ``timm.create_model("local-dir:FOLDER",
    pretrained=True)`` loads and the Hub shows: architecture, preprocessing and classes, weights, and the card.

    Before a file is written, it is compared with the original on up to 64 images, one of them alone and the others
    together.

    Args:
        run: the run's name.
        output: a file (or ``s3://`` object) whose name ends in .safetensors, in .onnx, or in .pt2 for
            ``torch.export.load(file).module()``; or a new folder.
        format: what to write, if the output's name does not say it.
        data: images to compare on; by default random pixels.
        storage: where the run is stored.
        trust: whether a network that is a function of the run's author may run.

    Raises:
        UsageError: there is no such run, it is not trusted, the network cannot be exported, or packages for ONNX are
            missing.
        StorageError: the images cannot be read, or the file cannot be written.
        RaytrainError: the exported network's logits differ; nothing was written.

    Example::

        print(raytrain.export("first", "first.onnx").example)  # lines that need no raytrain
    """
    output, storage = os.fspath(output), os.fspath(storage)
    if format not in (None, "huggingface"):
        raise UsageError(f"--format is {format!r}; give huggingface, or leave it out: the name of --output says it.")
    if format == "huggingface":
        return _export_folder(run, output, data, storage, trust=trust)
    check_output(output, tuple(_FORMATS))
    suffix, file_name = output[output.rindex(".") :], output.rpartition("/")[2]
    classifier = load(run, storage=storage, trust=trust)

    # The file is tried before it is written: an export that differs is worse than none.
    images = _images_to_compare(classifier, data)
    content, run_file = _FORMATS[suffix](classifier, run)
    comparison = _compare(run_file, classifier, images, output)
    write_output(output, content)

    if suffix == SUFFIX:
        # Weights do not say how images are preprocessed; the card beside them does. README.md may be somebody's own.
        card = output.removesuffix(SUFFIX) + ".card.md"
        lines = _write_card(card, file_name, classifier, run, storage)
        takes = "float32 images, as the card says"
    else:
        card, lines = None, example(classifier, file_name, suffix)
        shape = classifier.shape
        takes = f"uint8 (batch, {shape.height}, {shape.width}, {shape.channels}), decoded images"
    return ExportResult(
        run=run,
        checkpoint=classifier.checkpoint,
        output=output,
        size_bytes=len(content),
        input=takes,
        result=f"(batch, {len(classifier.classes)}), logits",
        classes=classifier.classes,
        **comparison,
        card=card,
        example=lines,
    )


def _write_card(card: str, weights_file: str, classifier: Classifier, run: str, storage: str) -> str:
    """Write the model card of a run's weights to ``card``; return the lines of Python in it that use ``weights_file``.

    Lines for a network that only the run's loop can build need raytrain.
    """
    store = open_run(storage, run)
    config, checkpoint = read_resolved_config(store), read_checkpoint(store, classifier.checkpoint)
    if checkpoint.progress.is_own_network:
        network = f"import raytrain\n\nmodel = raytrain.load({run!r}, storage={storage!r}, trust=True).network"
    else:
        network = network_lines(config, classifier.network, len(classifier.classes))
    lines = example(classifier, weights_file, SUFFIX, network)
    write_output(card, model_card(run, store, weights_file, config, checkpoint, lines))
    return lines


def _export_folder(run: str, output: str, data: Location | None, storage: str, *, trust: bool) -> ExportResult:
    """Write the network of a run as a folder for timm and the Hub; see :func:`export`.

    Raises UsageError also if the network is not one of timm's, or if there are files in the folder.
    """
    stored = open_run(storage, run)
    config = read_trusted_config(stored, trust=trust)
    checkpoint = read_checkpoint(stored, require_checkpoint(stored, run))
    store = check_new_folder(output, run, config, is_own_network=checkpoint.progress.is_own_network)
    classifier = load(run, storage=storage, trust=trust)

    # The folder is written on this machine first. What is compared is the network that timm loads from there, in a copy
    # of the classifier, which preprocesses the images.
    images = _images_to_compare(classifier, data)
    with TemporaryFolder() as folder:
        reloaded = copy.deepcopy(classifier)
        reloaded.network = write_network(folder / "network", config, classifier)
        comparison = _compare(partial(_logits_of, reloaded), classifier, images, output)
        contents = {name: (folder / "network" / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    lines = lines_with_timm(output, classifier)
    contents[CARD] = model_card(run, stored, WEIGHTS, config, checkpoint, lines)
    for name, content in contents.items():
        store.put(name, content)

    shape = classifier.shape
    return ExportResult(
        run=run,
        checkpoint=classifier.checkpoint,
        output=output,
        size_bytes=sum(map(len, contents.values())),
        input=f"float32 (batch, {shape.channels}, {shape.height}, {shape.width}), as timm's transform makes it",
        result=f"(batch, {len(classifier.classes)}), logits",
        classes=classifier.classes,
        **comparison,
        card=f"{output.rstrip('/')}/{CARD}",
        upload=None if "://" in output else shlex.join(["hf", "upload", "OWNER/NAME", output]),
        example=lines,
    )


def _images_to_compare(classifier: Classifier, data: Location | None) -> Pixels:
    """Return at most 64 images to compare on, uint8 (n, H, W, C): spread over those in ``data``, or random pixels.

    Images that cannot be read are left out. Raises UsageError if none can be read.
    """
    if data is None:
        size = (_NUM_CHECK_IMAGES, *classifier.shape)
        return np.random.default_rng(0).integers(0, 256, size, np.uint8)

    # Evenly spaced images of a listing, which is sorted by folders, are of all classes.
    store = open_store(os.fspath(data))
    manifest = list_images(store)
    chosen = np.linspace(0, len(manifest) - 1, min(_NUM_CHECK_IMAGES, len(manifest)), dtype=np.int64)
    return np.stack(readable_images(store, manifest.select(chosen), classifier.shape, classifier.cropping))


def _compare(run_file: RunFile, classifier: Classifier, images: Pixels, output: str) -> dict[str, Any]:
    """Compare the logits of the exported network, by ``run_file``, with those of ``classifier``.

    Returns the fields of :class:`ExportResult` about the comparison. Raises RaytrainError, which names the ``output``,
    if the logits differ more than rounding explains.
    """
    # One image alone and the others together, so that a file for a fixed batch size does not pass.
    logits = np.concatenate([run_file(batch) for batch in (images[:1], images[1:]) if len(batch)])
    expected = _logits_of(classifier, images)
    difference = float(np.abs(logits - expected).max())
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):  # written so that NaN fails too
        raise RaytrainError(
            f"The exported network's logits differ by up to {difference:.3g}, so {output} was not written; use the "
            "network that raytrain.load returns."
        )
    same_answers = int((logits.argmax(axis=1) == expected.argmax(axis=1)).sum())
    return {"images": len(images), "same_answers": same_answers, "largest_difference": difference}


@torch.no_grad()
def _logits_of(network: torch.nn.Module, images: Pixels) -> Logits:
    """Return the logits of ``network``, which preprocesses the images itself: a :data:`RunFile` for PyTorch."""
    return network(torch.from_numpy(images)).numpy()


# One function for each format: it returns the file's content, and a function that runs this content on images.


def _as_pt2(classifier: Classifier, run: str) -> tuple[bytes, RunFile]:
    """Return the network as a file of torch.export, preprocessing included, and a function that runs this file."""
    # torch.export keeps other files beside the program: the names of the classes, and the preprocessing.
    content = io.BytesIO()
    documents = {"classes.json": classifier.classes, "preprocessing.json": preprocessing(classifier)}
    extra_files = {name: json.dumps(document) for name, document in documents.items()}
    torch.export.save(_trace(classifier, run), content, extra_files=extra_files)
    content.seek(0)
    return content.getvalue(), partial(_logits_of, torch.export.load(content).module())


def _as_onnx(classifier: Classifier, run: str) -> tuple[bytes, RunFile]:
    """Return the network as an ONNX file, preprocessing included, and a function that runs this file on the CPU.

    Raises UsageError if a package for ONNX is missing, or ONNX lacks something that the network needs.
    """
    if missing := [name for name in ("onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"Export to ONNX needs onnxscript and onnxruntime, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed; install {extra('onnx')}, or use an --output that "
            "ends in .pt2."
        )
    import onnxruntime

    # ONNX keeps the names of the classes and the preprocessing as texts in its metadata.
    program = _trace(classifier, run)
    try:
        exported = torch.onnx.export(
            program, dynamo=True, input_names=["images"], output_names=["logits"], verbose=False
        )
        assert exported is not None
        exported.model.metadata_props["classes"] = json.dumps(classifier.classes)
        exported.model.metadata_props["preprocessing"] = json.dumps(preprocessing(classifier))
        content = exported.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # both packages raise many kinds
        raise UsageError(
            f"The network of run {run!r} cannot be a file of ONNX ({_first_line(error)}); use an --output that ends in "
            ".pt2."
        ) from error
    return content, lambda images: np.asarray(session.run(["logits"], {"images": images})[0])


def _as_weights(classifier: Classifier, run: str) -> tuple[bytes, RunFile]:
    """Return the weights as a safetensors file, and a function that computes logits with those read from it."""
    content = to_safetensors(classifier.network.state_dict(), classifier.classes)
    weights, _ = from_safetensors(content)

    # The file has nothing but weights, so they are tried in a copy of the classifier, which preprocesses the images.
    reloaded = copy.deepcopy(classifier)
    reloaded.network.load_state_dict(weights or {})
    return content, partial(_logits_of, reloaded)


def _trace(classifier: Classifier, run: str) -> ExportedProgram:
    """Return the network as a program for any number of images. Raise UsageError if its code cannot be traced."""
    # Two images, because torch.export would take a batch of one for a fixed size.
    images = torch.zeros((2, *classifier.shape), dtype=torch.uint8)
    try:
        return torch.export.export(classifier, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # torch.export raises many kinds
        raise UsageError(
            f"torch.export cannot trace the network of run {run!r} ({_first_line(error)}); use the network that "
            "raytrain.load returns."
        ) from error


def _first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_FORMATS: dict[str, Callable[[Classifier, str], tuple[bytes, RunFile]]] = {
    ".pt2": _as_pt2,
    ".onnx": _as_onnx,
    SUFFIX: _as_weights,
}
