"""Commands for a first try (demo, new), and those that fetch, upload and pack images."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from raytrain.cli.command import CommandResult, Storage
from raytrain.errors import UsageError
from raytrain.runs.outcome import shell_command
from raytrain.storage.folder import explain_os_error
from raytrain.storage.open import open_store


def fetch_dataset(
    name: Annotated[Positional[str], arg(help="cifar10 or flowers.")],
    destination: Annotated[Positional[str], arg(help="New folder to write its class folders into.")],
) -> CommandResult:
    """Download a public data set.

    Example: raytrain fetch-dataset cifar10 images
    """
    from raytrain.datasets.download import download

    return CommandResult(None, asdict(download(name, destination)))


def upload(
    folder: Annotated[Positional[str], arg(help="Folder to copy.")],
    url: Annotated[Positional[str], arg(help="Destination: s3://bucket/prefix, gs://… or az://…")],
) -> CommandResult:
    """Copy a folder of images to a bucket. Images that are there already are not sent again.

    Example: raytrain upload images s3://bucket/images
    """
    from raytrain.datasets.upload import upload as upload_folder

    return CommandResult(None, asdict(upload_folder(folder, url)))


def pack(
    source: Annotated[
        Positional[str], arg(help="Folder or URL (s3://…, gs://…, az://…) of images, or Parquet or tar files.")
    ],
    destination: Annotated[
        Positional[str], arg(help="Destination of the shards: a folder or a URL (s3://…, gs://…, az://…).")
    ],
    labels: Annotated[
        str | None,
        arg(help="Label file; by default metadata.csv or the like beside the images, else the folders are the labels."),
    ] = None,
    key_column: Annotated[
        str | None,
        arg(help="Column with the path of each image; by default key, path, file_name, filename, file or image."),
    ] = None,
    label_column: Annotated[
        tuple[str, ...],
        arg(help="Column with the class; by default label, class, target or category. Several hold 0 and 1."),
    ] = (),
    label_separator: Annotated[
        str | None, arg(help="Separates the classes of an image that may have several, as in cat|dog.")
    ] = None,
    label_pattern: Annotated[
        str | None, arg(help="Regular expression whose group label is the class in the name of a file.")
    ] = None,
    split: Annotated[str | None, arg(help="Pack the images of this value in the column split of --labels.")] = None,
    max_bad_fraction: Annotated[float, arg(help="Fraction of the rows of --labels that may lack an image.")] = 0.01,
    image_suffix: Annotated[
        str | None, arg(help="Image to take of each WebDataset sample with several, such as png; by default the JPEG.")
    ] = None,
    shorter_side: Annotated[
        int | None, arg(help="Pack larger images as JPEGs whose shorter side has so many pixels, such as 320.")
    ] = None,
    quality: Annotated[int, arg(help="Quality of the JPEGs that --shorter-side makes, 1 to 100.")] = 90,
) -> CommandResult:
    """Pack images into shards, which are faster to read. --data takes shards as well as images.

    Example: raytrain pack s3://bucket/train s3://bucket/train-shards
    """
    from raytrain.datasets.pack import pack as pack_shards

    result = pack_shards(
        source,
        destination,
        labels=labels,
        key_column=key_column,
        label_column=label_column,
        label_separator=label_separator,
        label_pattern=label_pattern,
        split=split,
        max_bad_fraction=max_bad_fraction,
        image_suffix=image_suffix,
        shorter_side=shorter_side,
        quality=quality,
    )
    return CommandResult(None, asdict(result))


def demo(storage: Storage = "./runs", workers: Annotated[int, arg(help="Training workers.")] = 2) -> CommandResult:
    """Draw images of digits, serve them over S3 on this machine, train on them, and test the result.

    Example: raytrain demo
    """
    from raytrain.demo.demo import run_demo, summary

    result = run_demo(storage=storage, workers=workers)
    return CommandResult(summary(result, storage), result.summary())


def new(
    folder: Annotated[Positional[str], arg(help="Folder to write into; no file there is replaced.")],
) -> CommandResult:
    """Start a project: a training loop of your own, and a script that trains it.

    Example: raytrain new my-project
    """
    if "://" in folder:
        raise UsageError(f"{folder} is not a folder of this machine; give one: a loop travels to a cluster from there.")
    target = Path(folder)
    with as_file(files("raytrain.cli") / "project_template") as template:
        names = sorted(path.name for path in template.iterdir() if path.is_file())
        # If one of the files exists already, none is written.
        existing = [name for name in names if (target / name).exists()]
        if existing:
            raise UsageError(f"{folder} already has a file {existing[0]}; name a new or an empty folder.")
        open_store(folder).check_writable()
        target.mkdir(parents=True, exist_ok=True)
        try:
            for name in names:
                shutil.copyfile(template / name, target / name)
        except OSError as error:  # such as a full disk; the files written so far are removed
            for name in names:
                (target / name).unlink(missing_ok=True)
            raise explain_os_error(error, folder) from error
    command = shell_command("train.py", program="python")
    text = f"Wrote {', '.join(names)} into {folder}. Train with:  cd {shlex.quote(folder)} && {command}"
    return CommandResult(text, {"folder": folder, "files": names})
