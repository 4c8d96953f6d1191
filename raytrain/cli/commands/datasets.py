"""Commands that fetch, upload and pack images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from raytrain.cli.command import CommandResult


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


@dataclass(frozen=True)
class PackingOptions:
    """How ``pack`` finds the labels, and what it writes."""

    labels: Annotated[
        str | None,
        arg(help="Label file; by default metadata.csv or the like beside the images, else the folders are the labels."),
    ] = None
    key_column: Annotated[
        str | None,
        arg(help="Column with the path of each image; by default key, path, file_name, filename, file or image."),
    ] = None
    label_column: Annotated[
        tuple[str, ...],
        arg(help="Column with the class; by default label, class, target or category. Several hold 0 and 1."),
    ] = ()
    label_separator: Annotated[
        str | None, arg(help="Separates the classes of an image that may have several, as in cat|dog.")
    ] = None
    label_pattern: Annotated[
        str | None, arg(help="Regular expression whose group label is the class in the name of a file.")
    ] = None
    split: Annotated[str | None, arg(help="Pack the images of this value in the column split of --labels.")] = None
    max_bad_fraction: Annotated[float, arg(help="Fraction of the rows of --labels that may lack an image.")] = 0.01
    image_suffix: Annotated[
        str | None, arg(help="Image to take of each WebDataset sample with several, such as png; by default the JPEG.")
    ] = None
    shorter_side: Annotated[
        int | None, arg(help="Pack larger images as JPEGs whose shorter side has this many pixels, such as 320.")
    ] = None
    quality: Annotated[
        int | None, arg(help="Quality of the JPEGs that --shorter-side makes, 1 to 100; by default 90.")
    ] = None


def pack(
    source: Annotated[
        Positional[str], arg(help="Folder or URL (s3://…, gs://…, az://…) of images, or Parquet or tar files.")
    ],
    destination: Annotated[
        Positional[str], arg(help="Destination of the shards: a folder or a URL (s3://…, gs://…, az://…).")
    ],
    packing: PackingOptions,
) -> CommandResult:
    """Pack images into shards, which are faster to read. --data takes shards as well as images.

    Example: raytrain pack s3://bucket/train s3://bucket/train-shards
    """
    from raytrain.datasets.pack import pack as pack_shards

    return CommandResult(None, asdict(pack_shards(source, destination, **vars(packing))))
