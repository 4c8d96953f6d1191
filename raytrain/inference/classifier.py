"""A trained network with its preprocessing and class names: what ``raytrain.load`` returns.

Whoever uses a network of a run (``evaluate``, ``predict``, ``serve``, ``export``) loads it here, so that all of them
prepare images alike.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from raytrain.config import ResolvedConfig
from raytrain.config.evaluation import TestView
from raytrain.config.named_functions import load_optional, stored_function_error
from raytrain.config.option_values import Location
from raytrain.data.dataset import evaluation_format
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.decode import decode, pixels_of, turn_upright
from raytrain.data.images.image_format import BadImage
from raytrain.errors import UsageError
from raytrain.inference.loop_network import loop_network
from raytrain.runs.documents import CONFIG, open_run, read_trusted_config
from raytrain.runs.stored_checkpoints import require_checkpoint, stored_thresholds
from raytrain.storage.open import read_input
from raytrain.storage.store import Store
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.evaluation import with_views
from raytrain.training.metrics.evaluation_metrics import DEFAULT_THRESHOLD
from raytrain.training.networks.model import model_of

if TYPE_CHECKING:
    from raytrain.training.run import Run

AnImage: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | BinaryIO | Image.Image | npt.NDArray[Any] | Tensor"
_BATCH_SIZE = 64  # images that the network sees at a time
_MAX_DIFFERENCE_CHARS = 200  # of how weights differ from the network, in an error
_CHANNELS = (1, 3, 4)  # of arrays: grey, RGB and RGBA


class Classifier(nn.Module):
    """The network of a run, from decoded images to logits.

    Attributes:
        classes: the names of the classes, in the order of the logits.
        shape: the shape of the images that the network takes.
        cropping: what it sees of an image file: all of it, or a part, and how that is resized.
        checkpoint: the path of the weights within the run.
        precision: the precision in which the run has evaluated it. The network itself computes in float32, or in
            float64 if the run did.
        mean, std: for each channel, with pixels from 0 to 1: what :meth:`forward` subtracts, and then divides by.
        test_views: copies of an image over which the logits are averaged: flip (mirrored), shift (by a pixel).
        thresholds: the probability of each class from which on an image has it; None if an image has one class.

    Example::

        model = raytrain.load("first")
        print(model.classify("photo.jpg"))  # ('cat', 0.97)
    """

    def __init__(
        self,
        config: ResolvedConfig,
        classes: tuple[str, ...],
        checkpoint: str,
        thresholds: Sequence[float] | None = None,
        network: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.thresholds = (thresholds or [DEFAULT_THRESHOLD] * len(classes)) if config.multi_label else None
        self.shape, self.cropping, _ = evaluation_format(config)
        self.checkpoint = checkpoint
        self.mean, self.std, self.precision = config.mean, config.std, config.precision
        self.test_views: Set[TestView] = frozenset(config.test_views)
        self.network = network or model_of(config, len(classes))
        self._augment = Augment(config)  # used only to resize and normalise images as for validation
        if config.precision == "float64":
            self.network.double()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of ``images``, decoded as uint8 (B, H, W, C).

        The images are resized and normalised as for validation. Raise UsageError if they have another type or shape.

        Example::

            logits = model(torch.from_numpy(pixels))
        """
        is_tensor = isinstance(images, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance] ; perhaps a path
        if not is_tensor or images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != self.shape.channels:
            got = f"{images.dtype} of the shape {tuple(images.shape)}" if is_tensor else f"a {type(images).__name__}"
            raise UsageError(
                f"The network of raytrain.load got {got}; give decoded images, uint8 (number, height, width, "
                f"{self.shape.channels}), or any images to its method classify."
            )
        # The logits of several views of an image, such as its mirror image, are averaged.
        network = with_views(self.network, self.test_views)
        return network(self._augment.evaluate(images))

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probability of each class, float64 (B, num_classes), for ``images`` as in :meth:`forward`."""
        return self.probabilities_of(self(images))

    def probabilities_of(self, logits: Tensor) -> Tensor:
        """Return the probability of each class, float64 (B, num_classes), for logits of that shape."""
        logits = logits.double()
        return logits.softmax(dim=1) if self.thresholds is None else logits.sigmoid()

    @overload
    def classify(self, images: AnImage) -> tuple[str, float]: ...
    @overload
    def classify(self, images: Iterable[AnImage]) -> list[tuple[str, float]]: ...
    def classify(self, images: AnImage | Iterable[AnImage]) -> tuple[str, float] | list[tuple[str, float]]:
        """Predict the likeliest class of an image and its probability, also if an image may have several classes.

        An image is a path or URL, the bytes of a file, an open file, an image of Pillow, or an array or tensor of
        pixels: (H, W) or (H, W, C), uint8 or from 0 to 1; a tensor may be (C, H, W). Several images, also (B, …) or a
        generator, give a list.

        Files are decoded as ``predict`` does. Pillow decodes a whole JPEG, and ``predict`` a large one at a fraction of
        its size, so the probability of an image that Pillow has opened may differ in the third digit.

        Raise UsageError if something is none of these or cannot be decoded, StorageError if a file cannot be read.

        Example::

            label, probability = model.classify("photo.jpg")
        """
        scores, labels = self._probabilities_of(images).max(dim=1)
        answers = [(self.classes[label], score) for label, score in zip(labels.tolist(), scores.tolist(), strict=True)]
        return answers[0] if _is_one(images) else answers

    @overload
    def classify_all(self, images: AnImage) -> dict[str, float]: ...
    @overload
    def classify_all(self, images: Iterable[AnImage]) -> list[dict[str, float]]: ...
    def classify_all(self, images: AnImage | Iterable[AnImage]) -> dict[str, float] | list[dict[str, float]]:
        """Return the classes that an image has by their thresholds, with their probabilities.

        If the images of the run have one class each, all classes are returned, the likeliest first. ``images`` are
        those that :meth:`classify` takes, with the same errors; several give a list.

        Example::

            for label, probability in model.classify_all("photo.jpg").items():
                print(label, probability)
        """
        # The probability of each class, by its name, for each image.
        rows = [dict(zip(self.classes, row, strict=True)) for row in self._probabilities_of(images).tolist()]
        if self.thresholds is None:
            answers = [dict(sorted(row.items(), key=itemgetter(1), reverse=True)) for row in rows]
        else:
            threshold_of = dict(zip(self.classes, self.thresholds, strict=True))
            answers = [{name: score for name, score in row.items() if score >= threshold_of[name]} for row in rows]
        return answers[0] if _is_one(images) else answers

    def _probabilities_of(self, images: AnImage | Iterable[AnImage]) -> Tensor:
        """Return the probability of each class for one or several images of any kind, float64 (n, num_classes)."""
        # Images are decoded on the CPU, one after the other, and classified where the network is, a few at a time: all
        # photographs of a folder at once would need more memory than there is.
        several = iter(cast("Iterable[AnImage]", (images,) if _is_one(images) else images))
        device = next(self.network.parameters()).device
        batches = [torch.zeros((0, len(self.classes)), dtype=torch.float64)]
        while pixels := [self._pixels(image) for image in islice(several, _BATCH_SIZE)]:
            batches.append(self.probabilities(torch.from_numpy(np.stack(pixels)).to(device)).cpu())
        return torch.cat(batches)

    def _pixels(self, image: AnImage) -> Pixels:
        """Return one image of any kind as the network takes it, uint8 (H, W, C).

        Raises UsageError if it is of no kind that :meth:`classify` takes or cannot be decoded, and StorageError if its
        file cannot be read.
        """
        crop = self.cropping.crop
        if isinstance(image, Image.Image) and image.mode == "F":  # Pillow itself would take 1 for nearly black
            image = np.asarray(image)
        if isinstance(image, Image.Image):
            try:
                return pixels_of(turn_upright(image), self.shape, crop)
            except Exception as error:  # Pillow may decode only now, and raises all kinds of exceptions then
                raise UsageError(f"An image of Pillow cannot be used: {str(error).rstrip('.')}.") from error

        # A file: its content is decoded like that of the training images.
        if isinstance(image, io.TextIOBase):
            raise UsageError('An image is a file that was opened as text; open it as bytes, open(…, "rb").')
        if hasattr(image, "read"):
            image = cast("BinaryIO", image).read()
        if isinstance(image, bytearray):
            image = bytes(image)
        if isinstance(image, (str, os.PathLike, bytes)):
            name, content = ("An image", image) if isinstance(image, bytes) else (image, read_input(os.fspath(image)))
            try:
                return decode(content, self.shape, crop)
            except BadImage as error:
                raise UsageError(f"{name} cannot be used: {error}.") from None

        return pixels_of(_array_as_pillow(image), self.shape, crop)


def _is_one(images: object) -> bool:
    """Return True for one image, and for anything that is no collection of images.

    Arrays of four dimensions, (B, H, W, C), are collections.
    """
    if isinstance(images, (np.ndarray, Tensor)):
        return images.ndim < 4
    is_file = isinstance(images, (str, bytes, bytearray)) or hasattr(images, "read")
    return is_file or isinstance(images, Image.Image) or not isinstance(images, Iterable)


def _array_as_pillow(image: object) -> Image.Image:
    """Return an array or tensor of pixels as an image of Pillow. Raise UsageError for anything else.

    Pixels are uint8, or numbers from 0 to 1; the shapes are those of :meth:`Classifier.classify`.
    """
    # A tensor may have its channels first. NumPy has no bfloat16, so floating-point numbers are converted to float64.
    if isinstance(image, Tensor):
        image = (image.double() if image.is_floating_point() else image).detach().cpu().numpy()
        if image.ndim == 3 and image.shape[0] in _CHANNELS and image.shape[2] not in _CHANNELS:
            image = np.moveaxis(image, 0, 2)
    if not isinstance(image, np.ndarray):
        raise UsageError(
            f"An image is of type {type(image).__name__}; give a path, the bytes of a file, an image of Pillow, or an "
            "array or tensor of pixels."
        )

    # Numbers from 0 to 1 become the nearest of 0 to 255; nothing else is guessed.
    pixels: npt.NDArray[Any] = image
    if pixels.dtype.kind == "f" and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = (pixels * 255).round().astype(np.uint8)
    has_shape_of_image = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in _CHANNELS)
    if pixels.dtype != np.uint8 or not has_shape_of_image or not pixels.size:
        raise UsageError(
            f"An image is an array of {pixels.dtype} of shape {pixels.shape}; give uint8, or numbers from 0 to 1, as "
            "(height, width) or (height, width, channels) with 1, 3 or 4 channels."
        )
    is_grey_with_channel = pixels.shape[2:] == (1,)  # (H, W, 1), which Pillow takes as (H, W) alone
    return Image.fromarray(pixels[:, :, 0] if is_grey_with_channel else pixels)


def load(
    run: str, *, storage: Location = "./runs", trust: bool = False, loop: Callable[[Run], None] | None = None
) -> Classifier:
    """Load the network of ``run`` onto the CPU, with the weights of its best checkpoint.

    If no checkpoint was evaluated, it is the newest one. If the run's loop has built its network itself, that loop is
    called here until it asks for its first epoch: by then it has built the network again.

    Args:
        run: the run's name.
        storage: the folder or URL of the runs.
        trust: run code of the run's author that the run names: a function that builds its network, or its loop.
        loop: the loop of a run that got it as a function, ``raytrain.train(config, loop=...)``.

    Raises:
        UsageError: there is no such run, it has no checkpoint, its network needs code without ``trust``, or that code
            builds another network now.
        StorageError: its storage cannot be used.

    Example::

        model = raytrain.load("first")
        print(model.classify("photo.jpg"))
    """
    return load_classifier(open_run(os.fspath(storage), run), run, trust=trust, loop=loop)


def load_classifier(store: Store, run: str, *, trust: bool, loop: Callable[[Run], None] | None = None) -> Classifier:
    """Load the network of ``run`` from the run's own ``store``; the other arguments and errors are :func:`load`'s."""
    config = read_trusted_config(store, trust=trust)
    path = require_checkpoint(store, run)
    checkpoint = read_checkpoint(store, path)
    classes = checkpoint.identity.classes

    # A network that the loop has built itself: the loop builds it again, which runs code of the run's author.
    network = None
    if checkpoint.progress.is_own_network:
        if loop is None and config.loop is None:
            raise UsageError(
                f"The loop of {run} has built its network itself, and was given as a function, which no file names: "
                f"call raytrain.load({run!r}, loop=the_function), or train with --loop file.py:function."
            )
        if loop is None and not trust:
            raise stored_function_error("loop", str(config.loop), f"{store.url}/{CONFIG}", may_be_named=False)
        loop = loop or cast("Callable[[Run], None]", load_optional("--loop", config.loop))
        network = loop_network(config, classes, loop, checkpoint.progress.network)

    # The weights do not fit if the code that builds the network has changed since.
    classifier = Classifier(config, classes, path, stored_thresholds(store, path, len(classes)), network)
    try:
        classifier.network.load_state_dict(checkpoint.weights or {})
    except RuntimeError as error:
        # torch lists every difference below a heading; the beginning of the list says which network it was.
        differences = str(error).partition("\n")[2]
        difference = textwrap.shorten(differences, _MAX_DIFFERENCE_CHARS, placeholder=" …").rstrip(".")
        builder = f"--model {config.model}" if network is None else "the network that its loop prepares now"
        raise UsageError(
            f"The weights of {run} are not those of {builder}: it trained another network ({difference})."
        ) from None
    return classifier.eval()
