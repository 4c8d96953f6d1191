"""Public data sets to try things with, fetched by torchvision and laid out as class folders of images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from raytrain.errors import StorageError, UsageError

FLOWERS_URL = "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
FLOWERS_MD5 = "6f87fb78e9cc9ab41eff2015b380011d"

_SCRATCH = ".download"  # hidden: what lists or uploads images does not see it


def fetch_dataset(name: str, destination: str, console: Console | None = None) -> dict[str, Any]:
    """Download a data set into the new folder ``destination``; a download that was interrupted is not begun anew once whole.

    ``cifar10`` becomes ``train/<class>/`` and ``test/<class>/``, 60,000 PNG images 32×32 (torchvision's ``CIFAR10``);
    ``flowers`` becomes ``<class>/``, 3,670 JPEG photographs of five classes (the set of TensorFlow's examples, for torchvision
    has none of so few classes), with its LICENSE.txt.

    Returns:
        name, destination and num_images.

    Raises:
        UsageError: there is no data set of this name, or ``destination`` is no folder that is empty or new.
        StorageError: the download fails, or is not what it should be.
    """
    if name not in _FETCHERS:
        raise UsageError(f"There is no data set {name!r}; there are {' and '.join(_FETCHERS)}.")
    folder = Path(destination).expanduser()
    _check_new(destination, folder)
    try:
        images = _FETCHERS[name](folder / _SCRATCH, console or Console(stderr=True))
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError where the checksum is wrong
        sentence = f"{name} could not be fetched into {destination} ({error}); check the network and the disk, and try again."
        raise StorageError(sentence) from error
    for found in images.iterdir():
        found.rename(folder / found.name)
    shutil.rmtree(folder / _SCRATCH)
    num_images = sum(1 for path in folder.rglob("*") if path.suffix in (".png", ".jpg"))
    return {"name": name, "destination": str(folder), "num_images": num_images}


def _check_new(destination: str, folder: Path) -> None:
    if "://" in destination or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{destination} is no folder; give a folder of this machine, and `raytrain upload` copies it to S3.")
    if folder.is_dir() and {path.name for path in folder.iterdir()} - {_SCRATCH}:
        raise UsageError(f"The folder {folder} is not empty; give a new one.")


def _fetch_cifar10(scratch: Path, console: Console) -> Path:
    """Download, and write each image as a PNG file, which keeps every pixel; gives the folder of the images."""
    from torchvision.datasets import CIFAR10

    images = scratch / "images"
    for split, is_train in (("train", True), ("test", False)):
        dataset = CIFAR10(scratch, train=is_train, download=True)
        folders = [images / split / name for name in dataset.classes]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        numbered = track(range(len(dataset)), f"Writing {split}", console=console)
        for number in numbered:
            image, label = dataset[number]
            image.save(folders[label] / f"{number:05d}.png")
    return images


def _fetch_flowers(scratch: Path, console: Console) -> Path:
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(FLOWERS_URL, scratch, md5=FLOWERS_MD5)
    return scratch / "flower_photos"


_FETCHERS: dict[str, Callable[[Path, Console], Path]] = {"cifar10": _fetch_cifar10, "flowers": _fetch_flowers}
