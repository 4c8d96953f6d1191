"""Download public data sets with torchvision, as class folders of images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import expanded_path, open_store

FLOWERS_URL = "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
FLOWERS_MD5 = "6f87fb78e9cc9ab41eff2015b380011d"

_TEMP_FOLDER = ".download"  # hidden, so that listing and uploading images ignore it


@dataclass(frozen=True)
class DownloadResult:
    """The result of :func:`download`."""

    name: str
    destination: str
    num_images: int


def download(name: str, destination: str, console: Console | None = None) -> DownloadResult:
    """Download a data set into the new folder ``destination``.

    After a failure, a second call does not download archives again that have arrived whole. ``console`` shows the
    progress bar; by default standard error.

    ``cifar10`` becomes ``train/<class>/`` and ``test/<class>/``, 60,000 PNG images 32×32 (torchvision's ``CIFAR10``).
    ``flowers`` becomes ``<class>/``, 3,670 JPEG photographs of five classes, with its LICENSE.txt (the data set of
    TensorFlow's examples, because torchvision has none with so few classes).

    Raises:
        UsageError: there is no data set of this name, or ``destination`` is not an empty or new folder.
        StorageError: the download fails, or its checksum is wrong.

    Example: ``download("flowers", "photos").num_images``
    """
    if name not in _DOWNLOADERS:
        raise UsageError(f"There is no data set {name!r}; choose {' or '.join(_DOWNLOADERS)}.")
    folder = expanded_path(destination)
    if "://" in destination or (folder.exists() and not folder.is_dir()):
        raise UsageError(
            f"{destination} is not a folder of this machine; give one, and copy it to S3 with `raytrain upload`."
        )
    if folder.is_dir() and {path.name for path in folder.iterdir()} - {_TEMP_FOLDER}:
        raise UsageError(f"The folder {folder} is not empty; give a new one.")

    open_store(str(folder)).check_writable()

    # Download into a hidden folder, and move the images out of it when all are complete.
    try:
        images = _DOWNLOADERS[name](folder / _TEMP_FOLDER, console or Console(stderr=True))
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError if the checksum is wrong
        raise StorageError(
            f"{name} could not be downloaded into {destination} ({error}); check the network and the disk, and "
            "try again."
        ) from error
    for path in images.iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / _TEMP_FOLDER)
    num_images = sum(1 for path in folder.rglob("*") if path.suffix in (".png", ".jpg"))
    return DownloadResult(name, str(folder), num_images)


def _download_cifar10(temp_folder: Path, console: Console) -> Path:
    """Download CIFAR-10, and write each image as a PNG file, without loss; return the folder of the images."""
    from torchvision.datasets import CIFAR10

    images = temp_folder / "images"
    for split, is_train in (("train", True), ("test", False)):
        dataset = CIFAR10(temp_folder, train=is_train, download=True)
        folders = [images / split / name for name in dataset.classes]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for number in track(range(len(dataset)), f"Writing {split}", console=console, disable=console.is_jupyter):
            image, label = dataset[number]
            image.save(folders[label] / f"{number:05d}.png")
    return images


def _download_flowers(temp_folder: Path, console: Console) -> Path:
    """Download and unpack the photographs of flowers; return the folder of the images."""
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(FLOWERS_URL, temp_folder, md5=FLOWERS_MD5)
    return temp_folder / "flower_photos"


_DOWNLOADERS: dict[str, Callable[[Path, Console], Path]] = {"cifar10": _download_cifar10, "flowers": _download_flowers}
