"""The model card of exported weights: what they are of, how well they do, and how to use them, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence

from raytrain.config import ResolvedConfig
from raytrain.config.network import timm_name
from raytrain.runs.outcome import train_command
from raytrain.runs.redact import one_line
from raytrain.training.checkpoint import Checkpoint

_CARD = """---
library_name: {library}
pipeline_tag: image-classification
tags:
- image-classification
- raytrain
---

# {title}

An image classifier with {num_classes} classes. `{file}` has its weights, by the names that they have in the network.

| | |
|---|---|
| network | `{model}`, {num_classes} outputs, {channels} input channels |
| training | {step:,} steps, {samples:,} images |
| test images | {result} |
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

`raytrain train --weights {file}` starts a run with them.

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


def model_card(run: str, file: str, config: ResolvedConfig, checkpoint: Checkpoint, lines: str) -> str:
    """The card of the weights in ``file``, those that ``checkpoint`` of ``run`` is evaluated with.

    ``lines`` of Python classify an image with the network.
    """
    identity, progress = checkpoint.identity, checkpoint.progress
    return _CARD.format(
        library="timm" if timm_name(config.model) else "pytorch",
        title=one_line(run),
        file=one_line(file),
        model=one_line(config.model),
        num_classes=len(identity.classes),
        channels=config.channels,
        step=progress.step,
        samples=progress.samples_seen,
        result=_result(checkpoint) + "".join(_TEST_VIEWS[view] for view in config.test_views),
        digest=one_line(identity.manifest_digest),
        preprocessing=_preprocessing(config),
        classes=json.dumps([one_line(name) for name in identity.classes], indent=2, ensure_ascii=False),
        use=f"{_use(config, len(identity.classes), one_line(file))}\n\n# Then, for an image:\n{lines}",
        command=one_line(train_command(config)),
    )


def _result(checkpoint: Checkpoint) -> str:
    progress = checkpoint.progress
    if progress.evaluated_step != progress.step or progress.test_accuracy is None or progress.test_loss is None:
        return "not measured"
    return f"accuracy {progress.test_accuracy:.2%}, loss {progress.test_loss:.4g}"


def _preprocessing(config: ResolvedConfig) -> str:
    height, width = config.full_image_size
    seen = _RESIZE.get(config.resize, f"the central {config.crop_fraction:g} of the image")
    colours = "grey" if config.channels == 1 else "RGB"
    return (
        f"Images are decoded as {colours} and resized to {height}×{width} pixels ({seen}; {config.interpolation}). "
        f"Pixels in 0..1, minus {_numbers(config.mean)}, divided by {_numbers(config.std)}, are the input: float32 "
        f"(batch, {config.channels}, {height}, {width})."
    )


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _use(config: ResolvedConfig, num_classes: int, file: str) -> str:
    """Lines of Python that load the weights without raytrain, if the network is a library's."""
    name = timm_name(config.model)
    load = f"weights = safetensors.torch.load_file({file!r})"
    if name is not None:
        make = f"model = timm.create_model({name!r}, num_classes={num_classes}, in_chans={config.channels})"
        return f"import safetensors.torch\nimport timm\n\n{load}\n{make}\nmodel.load_state_dict(weights)"
    return f"import safetensors.torch\n\n{load}  # for model.load_state_dict"
