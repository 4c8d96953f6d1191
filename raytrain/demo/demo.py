"""`raytrain demo`: draws digits, serves them from S3, trains on them and tests the result."""

from __future__ import annotations

import itertools
import math
import os
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console, Group, RenderableType
from rich.text import Text

from raytrain.display.result_page import try_next
from raytrain.errors import UsageError, format_count
from raytrain.runs.outcome import TrainResult
from raytrain.storage.folder import explain_os_error
from raytrain.storage.temporary_files import TemporaryFolder

SIZE = 28  # pixels a side
NUM_CLASSES = 10
MAX_ROTATION_DEGREES = 45.0
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmtt10"),
)

_OVERSAMPLE = 4  # digits are rotated at this multiple of SIZE and then averaged down, for smooth edges
_CANVAS = SIZE * _OVERSAMPLE
_DIGIT_HEIGHT = 20 * _OVERSAMPLE


def render_digits(
    directory: str | Path, num_images: int = 5000, validation_fraction: float = 0.1, seed: int = 0
) -> Path:
    """Draw grey 28x28 PNG images into class folders: ``train/<digit>/0001.png`` and ``test/<digit>/0001.png``.

    Every class gets ``num_images / 10`` images, rounded down, of which ``validation_fraction`` go to ``test``. The same
    arguments give the same pixels. Files of the same names are replaced, others stay. Returns ``directory`` as a path.
    Raises UsageError if a class would have no training or no validation image, StorageError if the images cannot be
    written.

    Example: ``render_digits("images", num_images=100)``
    """
    num_per_class = num_images // NUM_CLASSES
    num_validation = round(num_per_class * validation_fraction)
    if not 0 < num_validation < num_per_class:
        raise UsageError(
            f"num_images {num_images} and validation_fraction {validation_fraction} leave {num_validation} of a "
            f"class's {format_count(num_per_class, 'image')} for validation; each class needs an image for it and one "
            "for training."
        )
    root = Path(directory)
    # One generator draws all images in this order, so the pixels depend on nothing but the arguments.
    rng = np.random.default_rng(seed)
    try:
        for split, count in (("train", num_per_class - num_validation), ("test", num_validation)):
            for digit in range(NUM_CLASSES):
                folder = root / split / str(digit)
                folder.mkdir(parents=True, exist_ok=True)
                for number in range(1, count + 1):
                    Image.fromarray(draw_digit(digit, rng)).save(folder / f"{number:04d}.png", compress_level=1)
    except OSError as error:
        raise explain_os_error(error, str(root)) from error
    return root


def draw_digit(digit: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one image of a digit, uint8 (28, 28), light on dark, with random font, pose, contrast and noise.

    Example: ``draw_digit(7, np.random.default_rng(0))``
    """
    glyph = _glyph(str(rng.choice(FONTS)), digit)

    # The pose: rotated, scaled and shifted. Pillow takes the inverse map, from points of the result to the glyph.
    angle = math.radians(rng.uniform(-MAX_ROTATION_DEGREES, MAX_ROTATION_DEGREES))
    scale = rng.uniform(0.85, 1.1)
    shift_x, shift_y = rng.uniform(-2.0, 2.0, size=2) * _OVERSAMPLE
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    centre = _CANVAS / 2
    x, y = centre + shift_x, centre + shift_y
    inverse = (cos, sin, centre - cos * x - sin * y, -sin, cos, centre + sin * x - cos * y)
    rotated = glyph.transform(glyph.size, Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR)

    # Contrast and noise, in grey levels from 0 to 255.
    coverage = np.asarray(rotated.reduce(_OVERSAMPLE), dtype=np.float32) / 255  # (28, 28), 1: wholly covered by ink
    paper, ink = rng.uniform(0, 50), rng.uniform(170, 255)
    noise = rng.normal(0, rng.uniform(4, 14), coverage.shape)
    return np.clip(paper + (ink - paper) * coverage + noise, 0, 255).astype(np.uint8)


@cache
def _glyph(font: str, digit: int) -> Image.Image:
    """Draw a digit upright in the middle of the oversampled canvas, white on black, equally high in all fonts."""
    # Draw it with so much room on all sides that no font leaves the canvas, and cut it out.
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    canvas = Image.new("L", (3 * _CANVAS, 3 * _CANVAS))
    ImageDraw.Draw(canvas).text((_CANVAS, _CANVAS), str(digit), fill=255, font=ImageFont.truetype(str(path), _CANVAS))
    ink = canvas.crop(canvas.getbbox())

    # Scale it to the common height, and put it into the middle.
    ink = ink.resize((round(ink.width * _DIGIT_HEIGHT / ink.height), _DIGIT_HEIGHT), Image.Resampling.LANCZOS)
    glyph = Image.new("L", (_CANVAS, _CANVAS))
    glyph.paste(ink, ((_CANVAS - ink.width) // 2, (_CANVAS - ink.height) // 2))
    return glyph


IMAGES = "demo-images"
URL = "s3://demo/digits"


def run_demo(storage: str = "./runs", workers: int = 2, images: str = IMAGES) -> TrainResult:
    """Train on digits from a local S3 server, which stops with the run; takes about a minute on two cores.

    The digits stay in the folder ``images``, and the run in the folder ``storage``, as ``demo``, ``demo-2``, …
    Raises UsageError if ``storage`` is not a folder or this machine has no room for the ``workers``, StorageError if
    the digits cannot be written, and what :func:`raytrain.launch.train.train` raises.

    Example: ``run_demo(storage="./runs").validation_accuracy``
    """
    from raytrain.datasets.upload import upload
    from raytrain.demo.s3_server import S3Server
    from raytrain.display.terminal import TerminalView
    from raytrain.launch.placement import check_room, machine_hardware
    from raytrain.launch.train import train
    from raytrain.recipes import digits

    # Mistakes in the options are refused before anything is drawn.
    config = digits(
        name=unused_name(storage),
        storage=storage,
        data=f"{URL}/train",
        test_data=f"{URL}/test",
        address="local",  # the machines of another cluster could not reach the server
        workers=workers,
        device="cpu",
        epochs=8,
        batch_size=256,
        learning_rate=0.02,
        schedule="cosine",
        warmup_epochs=1,
        translate=2,
    )
    check_room(config, machine_hardware())
    console = Console()
    console.print(f"Drawing 5,000 digits into {images}/", highlight=False)
    render_digits(images)

    # From here on, it is an ordinary run on images in a bucket.
    with TemporaryFolder() as folder:
        buckets = folder / "buckets"
        (buckets / "demo").mkdir(parents=True)
        with S3Server(buckets) as server, aws_environment(server.environment()):
            upload(images, URL, console)
            with TerminalView(console) as view:
                return train(config, view=view.update)


def demo_page(result: TrainResult, storage: str = "./runs", images: str = IMAGES) -> RenderableType:
    """Return the page that the demo ends with: the validation accuracy, where everything is, and commands to try next.

    Example: ``Console().print(demo_page(run_demo()))``
    """
    accuracy = result.validation_accuracy
    measured = "not evaluated yet" if accuracy is None else f"{accuracy:.2%} of the validation images are right"
    locations = {"images": images, "run": _shortest(result.run_dir), "checkpoint": _shortest(result.checkpoint or "–")}
    return Group(
        Text.assemble(
            (measured, "bold"), f" after {result.steps:,} steps in {result.seconds:.0f} s ({result.status})."
        ),
        *(Text(f"{name:<12}{path}") for name, path in locations.items()),
        try_next(result.name, storage, f"{images}/test"),
    )


def _shortest(path: str) -> str:
    """Return ``path``, or the path from the current folder if that is shorter."""
    return min(path, os.path.relpath(path), key=len)


def unused_name(storage: str) -> str:
    """Return a name for the demo's run: the first of ``demo``, ``demo-2``, … that no run in ``storage`` has.

    Raises UsageError if ``storage`` is a bucket: in the demo, the AWS configuration is that of its own server.

    Example: ``unused_name("./runs")``
    """
    from raytrain.runs.documents import CONFIG, run_store

    if "://" in storage:
        raise UsageError(f"--storage is {storage}; the demo stores its run in a folder, such as ./runs.")
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    return next(name for name in names if not run_store(storage, name).exists(CONFIG))


def aws_environment(aws: dict[str, str]) -> AbstractContextManager[Any]:
    """Return a context in which the environment variables ``aws`` are the only AWS configuration of this process.

    So the user's keys or role do not interfere. At its end, the environment is as before.

    Example: ``with aws_environment(server.environment()): upload("images", "s3://demo/digits")``
    """
    other_variables = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    no_other_source = {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return patch.dict(os.environ, {**other_variables, **no_other_source, **aws}, clear=True)
