"""Exports a network of timm as a folder that timm loads, as repositories of Hugging Face's Hub have it.

The folder has ``config.json``, which timm's own function writes, ``model.safetensors`` and the card, ``README.md``.
timm builds the network from the architecture and its arguments, and treats images as ``pretrained_cfg`` says. It has
names of its own for what raytrain's options are called: ``crop_mode`` is --resize, and ``crop_pct`` --crop-fraction.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from raytrain.config import ResolvedConfig
from raytrain.config.network import timm_name
from raytrain.errors import UsageError
from raytrain.inference.classifier import Classifier
from raytrain.inference.model_card import lines_of_views
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.training.networks.model import timm_arguments
from raytrain.training.weights_source import to_safetensors

CARD, CONFIG, WEIGHTS = "README.md", "config.json", "model.safetensors"

_CROP_MODES = {"stretch": "squash", "crop": "center", "pad": "border"}  # of timm, for --resize
_LINES = """\
import timm
import torch
from PIL import Image

# Or "hf-hub:OWNER/NAME", once it is there.
model = timm.create_model({name!r}, pretrained=True).eval()
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**data)
{pad}image = Image.open("photo.jpg").convert("{mode}")
images = transform(image)[None]
{views}with torch.no_grad():
    logits = model(images).mean(dim=0)
scores = logits.{activation}
print(dict(zip(model.pretrained_cfg["label_names"], scores.tolist())))"""

_BLACK = """\
transform.transforms[1].fill = 0  # the network knows images on black; timm puts them on the mean colour
"""


def check_new_folder(output: str, run: str, config: ResolvedConfig, *, is_own_network: bool) -> Store:
    """Return the store of the new folder ``output`` for the network of ``run``.

    Raises UsageError if the network is not one of timm's, if the run's loop has built it (``is_own_network``), or if
    there are files in the folder.
    """
    if timm_name(config.model) is None or is_own_network:
        network = "built by its loop" if is_own_network else f"--model {config.model}"
        raise UsageError(
            f"--format huggingface is for networks of timm, and that of run {run!r} is {network}; train --model "
            f"timm:NAME, or export its weights with a card, --output {run}.safetensors."
        )
    store = open_store(output)
    first = next(iter(store.list()), None)
    if first is not None:
        raise UsageError(f"--output {output} holds files, such as {first.path}; name a new folder.")
    return store


def write_network(folder: Path, config: ResolvedConfig, classifier: Classifier) -> nn.Module:
    """Write the network and its configuration into ``folder``, and return the network as timm loads it from there.

    Raises UsageError if the installed version of timm cannot load a folder.
    """
    import timm
    from timm.models import save_for_hf

    # timm's own function writes the folder: what it needs to know of the images has its names.
    network, cropping = classifier.network, classifier.cropping
    image_settings = {
        "input_size": [config.channels, *config.full_image_size],
        "mean": list(config.mean),
        "std": list(config.std),
        "interpolation": cropping.interpolation,
        "crop_mode": _CROP_MODES[cropping.resize],
        "crop_pct": cropping.crop_fraction if cropping.resize == "crop" else 1.0,
    }
    save_for_hf(
        network,
        str(folder),
        model_config={"pretrained_cfg": image_settings, "label_names": list(classifier.classes)},
        model_args=timm_arguments(config, network),
        safe_serialization=True,
    )
    # The weights are written again with the names of the classes, which `raytrain train --weights` reads there.
    (folder / WEIGHTS).write_bytes(to_safetensors(network.state_dict(), classifier.classes))
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except AssertionError as error:  # older versions of timm know no local-dir:
        raise UsageError(f"timm {timm.__version__} loads no folder ({error}); install a newer one.") from None


def lines_with_timm(output: str, classifier: Classifier) -> str:
    """Return lines of Python that classify ``photo.jpg`` with timm, without raytrain."""
    return _LINES.format(
        name=f"local-dir:{output}",
        mode="L" if classifier.shape.channels == 1 else "RGB",
        views=lines_of_views(classifier),
        pad=_BLACK if classifier.cropping.resize == "pad" else "",
        activation="softmax(dim=0)" if classifier.thresholds is None else "sigmoid()",
    )
