"""A trained network in one file that needs no raytrain: for torch.export or as ONNX, and checked against the original."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from raytrain.data.decode import ImageReader, Pixels
from raytrain.data.manifest import list_images
from raytrain.errors import RaytrainError, UsageError
from raytrain.inference.classifier import Classifier, load
from raytrain.storage.open import open_store
from raytrain.storage.output_file import check_output, write_output

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Logits = npt.NDArray[np.floating[Any]]

_NUM_CHECKED = 64
_TOLERANCE = 1e-3  # of the largest logit: the order of sums differs, and float32 holds seven digits


def export(run: str, output: str, *, data: str | None = None, storage: str = "./runs") -> dict[str, Any]:
    """Write the network of a run's best checkpoint, preprocessing included, to a file that runs without raytrain.

    The file takes what :func:`raytrain.load` takes, any number of decoded images, uint8 (B, H, W, C), and gives the same logits,
    (B, num_classes). The names of the classes are in it, as JSON: in ONNX's metadata under ``classes``, in torch.export's as the extra
    file ``classes.json``. Before it is written, it is run beside the original on up to 64 images, one alone and the others together.

    Args:
        run: the run's name.
        output: a file (or s3:// object) ending in .pt2, for ``torch.export.load(file).module()``, or in .onnx.
        data: where the images are that it is checked on; by default random pixels.
        storage: where the run is.

    Returns:
        run, checkpoint, output, size_bytes, input and result (what goes in and comes out, in words), classes, images (checked on),
        same_answers (of these) and largest_difference (of a logit).

    Raises:
        UsageError: there is no such run, the network cannot be exported, or ONNX's packages are missing.
        StorageError: the images cannot be read, or the file cannot be written.
        RaytrainError: the exported network answers differently; nothing was written.
    """
    check_output(output, tuple(_FORMATS))
    encode, answer = _FORMATS[output[output.rindex(".") :]]
    classifier = load(run, storage=storage)
    images = _images(classifier, data)
    content = encode(_trace(classifier, run), classifier.classes)
    agreement = _compare(answer(content, images), _original(classifier, images), output)
    write_output(output, content)
    shape = classifier.shape
    return {
        "run": run,
        "checkpoint": classifier.checkpoint,
        "output": output,
        "size_bytes": len(content),
        "input": f"uint8 (batch, {shape.height}, {shape.width}, {shape.channels}), decoded images",
        "result": f"(batch, {len(classifier.classes)}), logits",
        "classes": list(classifier.classes),
        **agreement,
    }


def _compare(logits: Logits, expected: Logits, output: str) -> dict[str, Any]:
    difference = float(np.abs(logits - expected).max())
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):  # nor NaN
        raise RaytrainError(f"The exported network's logits are off by up to {difference:.3g}; {output} was not written.")
    same = logits.argmax(axis=1) == expected.argmax(axis=1)
    return {"images": len(same), "same_answers": int(same.sum()), "largest_difference": difference}


def _images(classifier: Classifier, data: str | None) -> Pixels:
    """Images to check with, uint8 (n, H, W, C): spread over all that lie in ``data``."""
    shape = classifier.shape
    if data is None:
        return np.random.default_rng(0).integers(0, 256, (_NUM_CHECKED, shape.height, shape.width, shape.channels), np.uint8)
    store = open_store(data)
    manifest = list_images(store)
    chosen = np.linspace(0, len(manifest) - 1, min(_NUM_CHECKED, len(manifest)), dtype=np.int64)
    pixels, bad = ImageReader(store, shape).read(manifest.select(chosen))
    if len(bad) == len(pixels):
        raise UsageError(f"None of {len(bad)} images looked at in {store.url} can be read ({bad[0]}); check what lies there.")
    return np.delete(pixels, list(bad), axis=0)


def _trace(classifier: Classifier, run: str) -> ExportedProgram:
    shape = classifier.shape
    example = torch.zeros((2, shape.height, shape.width, shape.channels), dtype=torch.uint8)
    try:
        return torch.export.export(classifier, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # of many kinds, as many as there are ways to write a network
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"The network of run {run!r} is none that torch.export can follow ({reason}); raytrain.load gives it as it is."
        ) from error


@torch.no_grad()
def _original(classifier: Classifier, images: Pixels) -> Logits:
    return classifier(torch.from_numpy(images)).numpy()


def _in_two(run: Callable[[Pixels], Logits], images: Pixels) -> Logits:
    """One image alone and the others together: a file that takes only one number of images does not pass."""
    return np.concatenate([run(part) for part in (images[:1], images[1:]) if len(part)])


def _to_pt2(program: ExportedProgram, classes: tuple[str, ...]) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"classes.json": json.dumps(classes)})
    return file.getvalue()


@torch.no_grad()
def _run_pt2(content: bytes, images: Pixels) -> Logits:
    module = torch.export.load(io.BytesIO(content)).module()
    return _in_two(lambda part: module(torch.from_numpy(part)).numpy(), images)


def _to_onnx(program: ExportedProgram, classes: tuple[str, ...]) -> bytes:
    _check_packages()
    exported = torch.onnx.export(program, dynamo=True, input_names=["images"], output_names=["logits"], verbose=False)
    assert exported is not None
    exported.model.metadata_props["classes"] = json.dumps(classes)
    return exported.model_proto.SerializeToString()


def _run_onnx(content: bytes, images: Pixels) -> Logits:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return _in_two(lambda part: np.asarray(session.run(["logits"], {"images": part})[0]), images)


def _check_packages() -> None:
    if missing := [name for name in ("onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"ONNX is written by onnxscript and checked by onnxruntime, and {' and '.join(missing)} is not installed: install "
            f"raytrain[onnx] (`uv sync --extra onnx`), or give an --output that ends in .pt2."
        )


_FORMATS: dict[str, tuple[Callable[[ExportedProgram, tuple[str, ...]], bytes], Callable[[bytes, Pixels], Logits]]] = {
    ".pt2": (_to_pt2, _run_pt2),
    ".onnx": (_to_onnx, _run_onnx),
}
