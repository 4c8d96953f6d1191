"""timm's networks, which ``--model timm:NAME`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from raytrain.errors import StorageError, UsageError, did_you_mean
from raytrain.training.model_names import unknown_timm_model

if TYPE_CHECKING:
    from timm.models import PretrainedCfg

_RESIZE = {"center": "crop", "squash": "stretch", "border": "pad"}
"""timm's ``crop_mode`` as ``--resize``."""


def build_timm_model(
    name: str, num_classes: int, channels: int, image_size: tuple[int, int] | None = None, **options: Any
) -> nn.Module:
    """timm's network ``name``, newly initialised: images (B, channels, H, W) -> logits (B, num_classes).

    If it takes images of one size only, it is made for ``image_size``, by default its own. ``options`` go to
    ``timm.create_model``. Raises UsageError if timm is missing, or has no such network.
    """
    pretrained = find_pretrained(name)
    import timm

    if pretrained.fixed_input_size and image_size not in (None, pretrained.input_size[1:]):
        options = {**options, "img_size": image_size}
    try:
        return timm.create_model(name, num_classes=num_classes, in_chans=channels, **options)
    except (AssertionError, ValueError) as error:  # such as an image size that the network cannot have
        raise UsageError(
            f"timm cannot build {name} for --image-size {_shown(image_size)}: {error}; its own size is "
            f"{_shown(pretrained.input_size[1:])}."
        ) from None


def build_pretrained_timm_model(name: str, channels: int, image_size: tuple[int, int] | None) -> nn.Module:
    """The same with the weights that timm has for it, and with their classes.

    They are downloaded from Hugging Face, and kept below HF_HOME. Raises UsageError if timm has none, StorageError if
    they cannot be downloaded.
    """
    pretrained = find_pretrained(name)
    if not pretrained.has_weights:
        raise UsageError(f"--weights DEFAULT: timm has no weights for {name}; leave --weights out, or give a file.")
    try:
        return build_timm_model(name, pretrained.num_classes, channels, image_size, pretrained=True)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"timm's weights for {name} cannot be downloaded ({error}); save them on a machine with a network "
            "connection with torch.save(model.state_dict(), FILE), and give --weights FILE."
        ) from None


def preprocessing(name: str, channels: int) -> dict[str, Any]:
    """The options of a run with which images are as those that timm's weights for ``name`` were trained on.

    Grey images get the mean over the colours.
    """
    pretrained = find_pretrained(name)
    mean, std = pretrained.mean, pretrained.std
    return {
        "image_size": pretrained.input_size[1:],
        "resize": _RESIZE.get(pretrained.crop_mode, "crop"),
        "crop_fraction": min(pretrained.crop_pct, 1.0),
        "interpolation": pretrained.interpolation,
        "mean": mean if channels == 3 else (sum(mean) / 3,),
        "std": std if channels == 3 else (sum(std) / 3,),
    }


def find_pretrained(name: str) -> PretrainedCfg:
    """What timm knows of the weights for its network ``name``, whose tag may be omitted. Raises UsageError."""
    try:
        from timm.models import PretrainedCfg, get_pretrained_cfg, is_model, list_models
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise unknown_timm_model(name, None) from None
    architecture, _, tag = name.partition(".")
    if not is_model(architecture):
        raise unknown_timm_model(name, list_models())
    try:
        return get_pretrained_cfg(name) or PretrainedCfg()
    except RuntimeError:
        tags = [each.partition(".")[2] for each in list_models(f"{architecture}.*", include_tags=True)]
        hint = did_you_mean(tag, tags)
        raise UsageError(
            f"--model timm:{name}: timm has no weights {tag} for {architecture}{hint}; it has {', '.join(tags)}."
        ) from None


def _shown(image_size: tuple[int, ...] | None) -> str:
    """A size as it is typed."""
    return " ".join(map(str, image_size or ()))
