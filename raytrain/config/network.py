"""Options of the network: the model, its weights, the images that it takes, and how it computes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval

from raytrain.config.option_marks import KnownAs, Mark, TakenBy
from raytrain.config.option_values import NUMBERS, OPTIONAL_LOCATION, TEXTS, Accepts, PositiveInt, option_field, section
from raytrain.errors import UsageError, flag, format_count

Size = tuple[int, int]
"""Height and width in pixels."""

Precision = Literal["float32", "tf32", "bfloat16", "float16", "float64"]
ImageSize = tuple[PositiveInt, PositiveInt]
Resize = Literal["stretch", "crop", "pad"]
CropFraction = Annotated[float, Interval(gt=0, le=1)]
Interpolation = Literal["bilinear", "bicubic"]
Resizer = Literal["pillow", "cykooz"]
Decoder = Literal["cpu", "gpu"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

DEFAULT_SIZE: Size = (224, 224)

_ARGUMENTS_OF_OPTIONS = {
    **dict.fromkeys(("num_classes", "n_classes", "num_class", "num_labels"), "the data say how many classes there are"),
    **dict.fromkeys(("in_chans", "in_channels", "channels"), "--channels says it"),
    **dict.fromkeys(("pretrained", "weights", "checkpoint_path", "pretrained_cfg"), "--weights says it"),
    "img_size": "--image-size says it",
}
"""Arguments of a library's networks that ``--model-option`` must not give, and what says them instead."""
_FULL_SIZE_AFTER = 0.8  # fraction of the epochs after which images have their full size
_SIDE_STEP = 4  # pixels; networks halve such a side twice without a remainder


@section
class NetworkOptions:
    """The network and the images that it takes."""

    model: Annotated[
        str,
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.SWEEPABLE,
        Mark.OWN_CODE,
        TakenBy("run.build_model"),
        KnownAs("arch net backbone network"),
    ] = "resnet18"
    """Name of a torchvision model, timm:NAME, or file.py:function, which may take num_classes and channels."""
    model_option: Annotated[
        tuple[str, ...],
        "NAME=VALUE",
        Mark.SHAPES_STATE,
        TakenBy("run.build_model"),
        KnownAs("dropout drop drop-path model-kwargs"),
    ] = option_field(default=(), converter=TEXTS)
    """Arguments of the function that makes the network, such as drop_path_rate=0.1; values as Python writes them."""
    weights: Annotated[
        str | None,
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.SWEEPABLE,
        Mark.SHARED_PLACE,
        TakenBy("run.build_model"),
        KnownAs("pretrained initial-checkpoint checkpoint ckpt ckpt-path"),
    ] = option_field(default=None, converter=OPTIONAL_LOCATION)
    """Initial weights: DEFAULT (the library's), a file, a URL (s3://, gs://, az://), hf://owner/name, a checkpoint."""
    freeze: Annotated[tuple[str, ...], Mark.SHAPES_STATE, TakenBy("run.build_model")] = option_field(
        default=(), converter=TEXTS
    )
    """Layers to freeze, batch norm statistics included, by name, such as layer1; all: all but the head."""
    image_size: Annotated[
        ImageSize | str | None,
        "H W|SIDE|MIN..MAX",
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.DECIDED_AT_START,
        KnownAs("size img img-size imgsz input-size resolution"),
    ] = option_field(default=None, converter=Accepts[int | str | Sequence[int] | None, ImageSize | str | None]())
    """In pixels; by default as timm's weights want it, or 224 224. 128..224: grows over the epochs."""
    channels: Literal[1, 3] = 3
    """1 reads the images as grey, 3 as RGB."""
    resize: Annotated[Resize | None, Mark.DECIDED_AT_START] = None
    """stretch (mostly the default) distorts an image to --image-size; crop shows its centre; pad puts it on black."""
    crop_fraction: Annotated[CropFraction | None, Mark.DECIDED_AT_START] = None
    """With --resize crop: fraction of the shorter side that is seen; by default as timm's weights want it, or 0.875."""
    interpolation: Annotated[Interpolation | None, Mark.DECIDED_AT_START] = None
    """How pixels are computed if an image is resized; by default as timm's weights want it, or bilinear."""
    resizer: Annotated[Literal["auto", Resizer], Mark.DECIDED_AT_START] = "auto"
    """Library that resizes JPEGs for training, bilinearly. auto: cykooz-resizer if all nodes have it, else Pillow,
    which is slower; pixels differ by up to 1 of 255. All other images are resized by Pillow."""
    decoder: Annotated[Literal["auto", Decoder], Mark.DECIDED_AT_START] = "auto"
    """What decodes JPEGs for training. gpu: each worker's GPU, which needs raytrain[gpu-decoder]; the workers then get
    files in place of pixels. auto: gpu if all workers can, else cpu. All other images are decoded by CPUs."""
    mean: Annotated[tuple[Annotated[float, Interval(ge=0, le=1)], ...] | None, Mark.DECIDED_AT_START] = option_field(
        default=None, converter=NUMBERS
    )
    """Mean of each channel to subtract, in 0..1; by default as timm's weights want it, or of the training images."""
    std: Annotated[tuple[Annotated[float, Interval(gt=0, le=1)], ...] | None, Mark.DECIDED_AT_START] = option_field(
        default=None, converter=NUMBERS
    )
    """Standard deviation of each channel to divide by, in 0..1; by default as --mean."""
    precision: Annotated[
        Literal["auto", Precision],
        Mark.CHOSEN_BY_AUTO,
        Mark.SWEEPABLE,
        Mark.DECIDED_AT_START,
        KnownAs("amp fp16 bf16 fp32 half mixed-precision"),
    ] = "auto"
    """auto: bfloat16 if all devices compute it natively, else float32. 16 bits are mixed: the weights stay float32.
    tf32: float32, with products that NVIDIA's GPUs since Ampere compute faster, from rounded factors."""
    batch_norm: Annotated[Literal["sync", "aggregate", "frozen"], Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE] = "sync"
    """sync normalises with the global batch; aggregate with each local batch, and combines the running statistics;
    frozen with the statistics of the initial weights, which stay as they are."""
    channels_last: Annotated[bool | Literal["auto"], Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, Mark.DECIDED_AT_START] = (
        "auto"
    )
    """Store images and weights in channels-last memory format; without a value: on. auto: on GPUs, for networks of
    convolutions that --model names and that take such images."""
    compile: Annotated[bool | CompileMode, Mark.SWEEPABLE, KnownAs("torchcompile")] = False
    """Compile the network with torch.compile, in a mode of it; without a value: default. reduce-overhead records CUDA
    graphs, which small networks gain by; max-autotune tries more kernels, and records them, too."""
    gradient_checkpointing: Annotated[bool, Mark.SWEEPABLE] = False
    """Compute parts of the network twice, to need less memory."""

    @property
    def model_options(self) -> dict[str, Any]:
        """The arguments in ``model_option`` by name; a value that Python does not read as a literal is text."""
        options: dict[str, Any] = {}
        for word in self.model_option:
            name, _, text = word.partition("=")
            try:
                options[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                options[name] = text
        return options

    @property
    def compile_mode(self) -> CompileMode | None:
        """The mode in which the network is compiled; None if it is not."""
        return "default" if self.compile is True else self.compile or None

    @property
    def full_image_size(self) -> ImageSize:
        """The height and width of images at the end of training, which may start with smaller ones."""
        return first_and_full_size(self.image_size or DEFAULT_SIZE)[1]


def check_network(options: NetworkOptions) -> None:
    """Raise UsageError for a malformed image size or argument, or a ``mean`` or ``std`` that does not fit the channels.

    Also refused is an argument of a library's network that another option decides.
    """
    if isinstance(options.image_size, str) and not re.fullmatch(r"[1-9]\d*\.\.[1-9]\d*", options.image_size):
        raise UsageError(
            f"--image-size is {options.image_size!r}; give a side, such as 224, height and width, or a range for "
            "images that grow from epoch to epoch, such as 128..224."
        )

    # Arguments of the network: each once, and none of those that another option decides. A function of the user's own
    # may call its arguments as it likes.
    names = [word.partition("=")[0] for word in options.model_option]
    for name, word in zip(names, options.model_option, strict=True):
        if "=" not in word or not name.isidentifier():
            raise UsageError(f"--model-option is {word!r}; give NAME=VALUE, such as drop_path_rate=0.1.")
        is_of_library = ":" not in options.model or timm_name(options.model) is not None
        if is_of_library and (instead := _ARGUMENTS_OF_OPTIONS.get(name)) is not None:
            raise UsageError(f"--model-option {word}: {instead}; leave it out.")
        if names.count(name) > 1:
            raise UsageError(f"--model-option gives {name} {names.count(name)} times; give it once.")

    # One number per channel.
    for name in ("mean", "std"):
        value = getattr(options, name)
        if value is not None and len(value) != options.channels:
            raise UsageError(
                f"{flag(name)} has {format_count(len(value), 'number')} for "
                f"{format_count(options.channels, 'channel')}; give one number per channel."
            )


def timm_name(model: str | None) -> str | None:
    """Return the name within timm of a model; None if ``model`` is not timm's.

    Example: ``timm_name("timm:resnet50.a1_in1k") == "resnet50.a1_in1k"``
    """
    library, colon, name = (model or "").partition(":")
    return name if colon and library == "timm" else None


def first_and_full_size(image_size: Size | str) -> tuple[Size, Size]:
    """Return the size of training images in the first epoch, and the size in the last epochs and of all other images.

    They differ only for a range, which is a text. Example:
    ``first_and_full_size("128..224") == ((128, 128), (224, 224))``
    """
    if not isinstance(image_size, str):
        return image_size, image_size
    first, _, full = image_size.partition("..")
    return (int(first), int(first)), (int(full), int(full))


def training_size(image_size: Size | str, epoch: int, epochs: int) -> Size:
    """Return the size of training images in ``epoch``, counted from 0, of a run of ``epochs`` epochs.

    The size grows linearly, in steps of four pixels. It is the full size in the last fifth of the epochs, and always in
    the last one, so that the network fits the size with which it is used.

    Example: ``training_size("128..224", epoch=2, epochs=10) == (152, 152)``
    """
    first, full = first_and_full_size(image_size)
    fraction = epoch / max(1, int(_FULL_SIZE_AFTER * epochs))
    if first == full or fraction >= 1:
        return full
    height, width = (
        side + int(fraction * (end - side)) // _SIDE_STEP * _SIDE_STEP for side, end in zip(first, full, strict=True)
    )
    return height, width
