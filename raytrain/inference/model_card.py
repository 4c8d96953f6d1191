"""Model card of exported weights as Markdown, and lines of Python that use an exported file without raytrain."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from raytrain.config import ResolvedConfig
from raytrain.config.named_functions import load_function
from raytrain.config.network import timm_name
from raytrain.errors import format_count
from raytrain.inference.classifier import Classifier
from raytrain.recipes import auto
from raytrain.runs.metric_row import MetricRow, own_metrics
from raytrain.runs.metrics_history import read_evaluations
from raytrain.runs.outcome import train_command
from raytrain.runs.provenance import provenance_at, read_provenance
from raytrain.runs.redact import one_line
from raytrain.storage.store import Store
from raytrain.training.checkpoint import Checkpoint
from raytrain.training.networks.model import OPTIONS, network_arguments, timm_arguments
from raytrain.training.weights_source import SUFFIX

_CARD = """---
library_name: {library}
pipeline_tag: image-classification
tags:
- image-classification
- raytrain
---

# {title}

An image classifier with {num_classes} classes. `{file}` holds its weights, under their names in the network.

| | |
|---|---|
| network | {network}, {outputs}, {channels} |
| training | {step:,} steps, {samples:,} images |
{results}
| made of | {made_of} |
| training data | SHA-256 of the names, labels and sizes of the images: `{digest}` |

## Preprocessing

{preprocessing}

## Classes

In the order of the outputs:

```json
{classes}
```

## Use

```python
{use}
```
{start}
## Training

```sh
{command}
```
"""

_TEST_VIEWS = {
    "flip": "; the logits are the mean of those for an image and for its mirror image",
    "shift": "; the logits are averaged over shifted copies of an image",
}
_RESIZE = {"stretch": "all of the image, distorted", "pad": "all of the image, on black"}


def model_card(run: str, store: Store, file: str, config: ResolvedConfig, checkpoint: Checkpoint, lines: str) -> bytes:
    """Return the model card of ``file`` in Markdown; the file has the evaluated weights of a ``checkpoint`` of ``run``.

    ``lines`` of Python, such as those of :func:`example`, classify an image with the network. In the ``store`` of the
    run are the provenance of the attempt that wrote the checkpoint, and the rows of its evaluation and of the test
    images.
    """
    identity, progress = checkpoint.identity, checkpoint.progress
    provenance = provenance_at(read_provenance(store), progress.step)

    # The last evaluation counts only if it is of these very weights: the run may have trained on since.
    views = "".join(_TEST_VIEWS[view] for view in config.test_views)
    result = "not measured"
    evaluation, test = read_evaluations(store, progress.step)
    if progress.evaluated_step == progress.step:
        result = _measured(progress.validation_accuracy, progress.validation_loss, evaluation) or result
    results = f"| validation images | {result}{views} |"
    if test is not None and (of_test := _measured(test.accuracy, test.loss, test)):
        results += f"\n| test images | {of_test}{views} |"

    # From the file of an image to the input of the network, in words.
    height, width = config.full_image_size
    colours = "grey" if config.channels == 1 else "RGB"
    cropped = f"a central part of that shape, {config.crop_fraction:g} times as wide as the largest one"
    resized = _RESIZE.get(config.resize, cropped)
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (config.mean, config.std))
    preprocessing_text = (
        f"Images are decoded as {colours} and resized to {height}×{width} pixels ({resized}; {config.interpolation}). "
        f"Pixels from 0 to 1, minus {mean}, divided by {std}, are the input: float32 "
        f"(batch, {config.channels}, {height}, {width})."
    )

    # The options name the network, which is not known from the weights, unless the run's own loop has built it.
    if progress.is_own_network:
        network, start = f"built by the run's own loop{f' `{one_line(config.loop)}`' if config.loop else ''}", ""
    else:
        network = f"`{one_line(config.model)}`"
        options = {name: getattr(config, name) for name in ("model", "model_option", "channels")}
        command = one_line(train_command(auto(data="IMAGES", weights=file, **options)))
        start = f"\n`{command}` starts a run with them.\n"

    # Names of classes, runs and networks may hold any text: one line of printable characters is left of each.
    return _CARD.format(
        library="timm" if timm_name(config.model) else "pytorch",
        title=one_line(run),
        file=one_line(file),
        network=network,
        num_classes=len(identity.classes),
        outputs=format_count(len(identity.classes), "output"),
        channels=format_count(config.channels, "input channel"),
        step=progress.step,
        samples=progress.samples_seen,
        results=results,
        made_of=one_line(provenance.summary()) if provenance else "not known",
        digest=one_line(identity.manifest_digest),
        preprocessing=preprocessing_text,
        classes=json.dumps([one_line(name) for name in identity.classes], indent=2, ensure_ascii=False),
        use=lines,
        start=start,
        command=one_line(train_command(config)),
    ).encode()


def _measured(accuracy: float | None, loss: float | None, row: MetricRow | None) -> str:
    """Return accuracy, loss, and the metrics of ``row`` that not every run has; "" without accuracy or loss."""
    if accuracy is None or loss is None:
        return ""
    other_metrics = own_metrics(None, row)  # those of --metrics among them
    return f"accuracy {accuracy:.2%}, loss {loss:.4g}" + "".join(
        f", {one_line(name.removeprefix('validation '))} {value:.4g}"
        for name, value in other_metrics.items()
        if value is not None
    )


# The lines of Python that :func:`example` puts together. They do what data/images/decode.py does: a JPEG is decoded at
# a fraction of its size (draft) if that is still large enough, and turned upright as its EXIF data say; then the part
# that the network sees is resized to the size of its input.

_DRAFT = """\
width, height = image.size[:: -1 if image.getexif().get(274, 1) > 4 else 1]
{scale}
size = [math.ceil(side * min(1, scale) - 1e-6) for side in image.size]
image.draft("{mode}", size)
image = ImageOps.exif_transpose(image).convert("{mode}")
"""
_SCALES = {
    "stretch": "scale = max({w} / width, {h} / height)",
    "crop": "scale = max({w} / width, {h} / height) / {fraction:g}",
    "pad": "scale = min({w} / width, {h} / height)\n"
    "inside = [max(1, round(side * scale)) for side in (width, height)]\n"
    "scale = max(inside[0] / width, inside[1] / height)",
}
_RESIZE_LINES = {
    "stretch": "image = image.resize(({w}, {h}), Image.Resampling.{interpolation})\n",
    "crop": """\
part = {fraction:g} * min(image.width / {w}, image.height / {h})
w, h = min({w} * part, image.width), min({h} * part, image.height)
left, top = (image.width - w) / 2, (image.height - h) / 2
x, y, right, bottom = int(left), int(top), left + w, top + h
image = image.crop((x, y, math.ceil(right), math.ceil(bottom)))
box = left - x, top - y, right - x, bottom - y
image = image.resize(({w}, {h}), Image.Resampling.{interpolation}, box)
""",
    "pad": """\
image = image.resize(inside, Image.Resampling.{interpolation})
black = Image.new("{mode}", ({w}, {h}))
black.paste(image, (({w} - inside[0]) // 2, ({h} - inside[1]) // 2))
image = black
""",
}
_RUN = {
    ".onnx": """\
session = onnxruntime.InferenceSession({file!r})
logits = session.run(None, {{"images": np.asarray(image)[{axes}]}})[0][0]
about = session.get_modelmeta().custom_metadata_map
classes = json.loads(about["classes"])
""",
    ".pt2": """\
files = {{"classes.json": ""}}
model = torch.export.load({file!r}, extra_files=files).module()
pixels = torch.from_numpy(np.array(image)[{axes}])
logits = model(pixels).detach().numpy()[0]
classes = json.loads(files["classes.json"])
""",
    SUFFIX: """\
pixels = np.asarray(image, np.float32)[{axes}] / 255
pixels = (pixels - {mean}) / {std}
images = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))
{views}{network}
model.load_state_dict(safetensors.torch.load_file({file!r}))
logits = model.eval()(images).detach().numpy().mean(axis=0)
with safetensors.safe_open({file!r}, "pt") as opened:
    classes = json.loads(opened.metadata()["classes"])
""",
}
_VIEWS = {  # of --test-views, by which `predict` averages the logits; weights know nothing of them
    "shift": """\
padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
shifted = [padded[:, :, 2:, 2:], padded[:, :, :-2, :-2]]
images = torch.cat([images, images, *shifted])
""",
    "flip": """\
images = torch.cat([images, images.flip(-1)])
""",
}
_SOFTMAX = """\
scores = np.exp(logits - logits.max())
scores /= scores.sum()
"""
_SIGMOID = """\
scores = 1 / (1 + np.exp(-logits))
"""
_RUNTIMES = {".onnx": "onnxruntime", ".pt2": "torch", SUFFIX: "safetensors.torch\nimport torch"}
_IMPORTS = """\
import json
import math

import numpy as np
import {runtime}
from PIL import Image, ImageOps

image = Image.open("photo.jpg")
"""


def preprocessing(classifier: Classifier) -> dict[str, Any]:
    """Return how images are prepared for the network, and its classes, as plain values for an exported file."""
    cropping = classifier.cropping
    return {
        "image_size": list(classifier.shape.size),
        "channels": classifier.shape.channels,
        "resize": cropping.resize,
        "crop_fraction": cropping.crop_fraction,
        "interpolation": cropping.interpolation,
        "mean": list(classifier.mean),
        "std": list(classifier.std),
        "classes": list(classifier.classes),
    }


def network_lines(config: ResolvedConfig, network: nn.Module, num_classes: int) -> str:
    """Return lines of Python that build the network that the options name, as ``model``, with random weights.

    ``network`` is that network, built by raytrain. If the options name a user's function, it is imported, to look at
    its parameters.
    """
    # A network of timm.
    name, channels = config.model, config.channels
    in_timm = timm_name(name)
    if in_timm is not None:
        options = {"num_classes": num_classes, **timm_arguments(config, network)}
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        return f"import timm\n\nmodel = timm.create_model({in_timm!r}, {arguments})"

    # A function in a file or a package. Its parameters say whether it takes num_classes and channels.
    if ":" in name:
        module, _, function = name.rpartition(":")
        numbers = network_arguments(load_function("--model", name), num_classes, channels)
        arguments = ", ".join(f"{key}={value!r}" for key, value in {**numbers, **config.model_options}.items())
        if module.endswith(".py"):
            return f"import runpy\n\nmodel = runpy.run_path({module!r})[{function!r}]({arguments})"
        return f"from {module} import {function}\n\nmodel = {function}({arguments})"

    # A network of torchvision. It begins with a convolution of 3 channels, which is replaced for others.
    options = {"num_classes": num_classes, **OPTIONS.get(name, {}), **config.model_options}
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    lines = [f"import torchvision\n\nmodel = torchvision.models.{name}({arguments})"]
    if channels != 3:
        path, conv = next((path, layer) for path, layer in network.named_modules() if isinstance(layer, nn.Conv2d))
        lines.append(f"model.set_submodule({path!r}, torch.nn.{conv!r})")
    return "\n".join(lines)


def lines_of_views(classifier: Classifier) -> str:
    """Return the lines of Python that add the test views of an image to ``images``, (1, C, H, W); "" if it has none.

    The mean of the logits over these images is what ``predict`` computes. There, a shifted copy counts half as much as
    the image itself, which therefore is among them twice.
    """
    return "".join(lines for view, lines in _VIEWS.items() if view in classifier.test_views)


def example(classifier: Classifier, file: str, suffix: str, network: str = "") -> str:
    """Return lines of Python that classify ``photo.jpg`` with the network in ``file``, without raytrain.

    The scores are those of ``predict``. ``suffix`` is the ending of the file's name, with the dot. Weights
    (.safetensors) need ``network``, the lines that build it: a network that raytrain has itself is imported from
    ``raytrain.models``.
    """
    cropping, shape = classifier.cropping, classifier.shape
    values = {
        **preprocessing(classifier),
        "file": file,
        "network": network,
        "views": lines_of_views(classifier),
        "w": shape.width,
        "h": shape.height,
        "fraction": cropping.crop_fraction,
        "mode": "L" if shape.channels == 1 else "RGB",
        "axes": "None, ..., None" if shape.channels == 1 else "None",  # a batch of one, with an axis of channels
        "interpolation": cropping.interpolation.upper(),
    }

    # The lines: how far a JPEG may be shrunk while it is decoded, how it is resized then, and the call of the network.
    values["scale"] = _SCALES[cropping.resize].format(**values)
    lines = _DRAFT + _RESIZE_LINES[cropping.resize] + _RUN[suffix]

    # Around them: imports, the scores of the logits, and a line that prints them.
    imports = _IMPORTS.format(runtime=_RUNTIMES[suffix])
    scores = _SOFTMAX if classifier.thresholds is None else _SIGMOID
    print_line = "print(dict(zip(classes, scores.tolist())))"
    return f"{imports}{lines.format(**values)}{scores}{print_line}"
