"""Lines of Python that use an exported network without raytrain: with Pillow, NumPy and what runs the file."""

from __future__ import annotations

import json
from typing import Any

from raytrain.inference.classifier import Classifier

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
_RESIZE = {
    "stretch": "image = image.resize(({w}, {h}), Image.Resampling.{interpolation})\n",
    "crop": """\
part = {fraction:g} * min(image.width / {w}, image.height / {h})
left, top = (image.width - {w} * part) / 2, (image.height - {h} * part) / 2
x, y, right, bottom = int(left), int(top), left + {w} * part, top + {h} * part
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
    ".safetensors": """\
pixels = (np.asarray(image, np.float32)[{axes}] / 255 - {mean}) / {std}
logits = model(torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))).detach().numpy()[0]
""",
}
_SOFTMAX = """\
scores = np.exp(logits - logits.max())
scores /= scores.sum()
"""
_SIGMOID = """\
scores = 1 / (1 + np.exp(-logits))
"""
_IMPORTS = """\
import json
import math

import numpy as np
import {runtime}
from PIL import Image, ImageOps

image = Image.open("photo.jpg")
"""


def preprocessing(classifier: Classifier) -> dict[str, Any]:
    """How the network wants its images, as plain values: the metadata of an exported file."""
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


def example(classifier: Classifier, file: str, suffix: str) -> str:
    """Lines that classify ``photo.jpg`` with the network in ``file``; the scores are those of ``predict``."""
    cropping, shape = classifier.cropping, classifier.shape
    values = {
        "file": file,
        "w": shape.width,
        "h": shape.height,
        "mode": "L" if shape.channels == 1 else "RGB",
        "axes": "None, ..., None" if shape.channels == 1 else "None",
        "fraction": cropping.crop_fraction,
        "interpolation": cropping.interpolation.upper(),
        "mean": list(classifier.mean),
        "std": list(classifier.std),
    }
    values["scale"] = _SCALES[cropping.resize].format(**values)
    imports = _IMPORTS.format(runtime="onnxruntime" if suffix == ".onnx" else "torch")
    lines = _DRAFT + _RESIZE[cropping.resize] + _RUN[suffix]
    end = _SOFTMAX if classifier.thresholds is None else _SIGMOID
    names = json.dumps(list(classifier.classes)) if suffix == ".safetensors" else "classes"
    shown = f"print(dict(zip({names}, scores.tolist())))"
    return f"{imports}{lines.format(**values)}{end}{shown}"
