"""Files below a URL: which are images, and their classes and the split by the names of their folders.

An image's class is the topmost folder that it is in, as for torchvision and Keras: a class folder may hold other
folders. Folders that all images share are no classes. Images in ``train/`` and ``test/``, or under names like these,
are training and test images, whether the classes are below them (``train/cat``) or above them (``cat/train``).
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from raytrain.errors import UsageError
from raytrain.storage.folder import dead_ends
from raytrain.storage.store import Store, StoredObject

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif")
_OTHER_FORMATS = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".svg", ".ppm", ".pgm", ".dng", ".dcm")
"""Formats of images that are not read."""
_CONTAINERS = {
    **dict.fromkeys((".zip", ".gz", ".xz", ".bz2", ".zst", ".lz4", ".rar", ".7z"), "unpack it and give the folder"),
    ".tgz": "pack it with `raytrain pack`, or unpack it and give the folder",
    **dict.fromkeys((".tar", ".parquet"), "pack it with `raytrain pack`, and give the packed folder"),
    ".arrow": "write it as Parquet (`Dataset.to_parquet` of datasets), and pack that with `raytrain pack`",
    **dict.fromkeys(
        (".mds", ".tfrecord", ".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl", ".pickle", ".mdb", ".lmdb", ".beton"),
        "write its samples as Parquet or as files in class folders",
    ),
}
_SYSTEM_FOLDERS = frozenset({"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"})
_SYSTEM_FILES = frozenset({"Thumbs.db", "desktop.ini"})
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = range(120, 141)  # a pointer of Git LFS is 127 to 134 bytes long
HIDDEN = "hidden files and thumbnails of the system"
TABLES = "tables and descriptions"
_TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt", ".md", ".xml", ".yaml", ".yml", ".html")
_NO_LOSS = (HIDDEN, TABLES)
LINKS = "links that lead nowhere"
EMPTY = "empty folders"
POINTERS = "pointers of Git LFS (`git lfs pull` fetches the images)"


@dataclass
class Listing:
    """The image files below ``url``, sorted by path, and the paths of all other files by why they are left out."""

    url: str
    images: list[StoredObject] = field(default_factory=list)
    left_out: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def counts(self) -> dict[str, int]:
        """How many files are left out, by reason."""
        return {reason: len(paths) for reason, paths in self.left_out.items()}


def list_files(store: Store) -> Listing:
    """All files below ``store``. Raises StorageError if it cannot be listed, UsageError if it has no image."""
    listing = Listing(store.url)
    found: list[StoredObject] = []
    for stored in store.list():
        reason = why_left_out(stored.path)
        if reason is None:
            found.append(stored)
        else:
            listing.left_out[reason].append(stored.path)
    for path in dead_ends(store):
        listing.left_out[HIDDEN if is_hidden(path.rstrip("/")) else EMPTY if path.endswith("/") else LINKS].append(path)
    if pointers := _lfs_pointers(store, found):
        listing.left_out[POINTERS] += pointers
    listing.images = sorted(stored for stored in found if stored.path not in pointers)
    if not listing.images:
        raise _no_images(listing)
    return listing


def tell_left_out(listing: Listing, folders: FolderLabels | None = None) -> None:
    """Log how many files are left out and why, but not hidden files and tables; classes without images; equal ones."""
    tell_alike(sorted(set(folders.classes)) if folders else (), listing.url)
    reasons = lost_files(listing.counts)
    if not reasons:
        return
    lost_classes = [] if folders is None else _lost_classes(listing, folders)
    lost = ", ".join(map(repr, lost_classes[:5])) + (", …" if len(lost_classes) > 5 else "")
    logging.getLogger("raytrain").warning(
        "Left out below %s: %s.%s", listing.url, reasons, f" No image is left in {lost}." if lost else ""
    )


def lost_files(left_out: Mapping[str, int]) -> str:
    """How many files are left out for which reasons, the most first; without hidden files and tables."""
    told = [(reason, count) for reason, count in left_out.items() if reason not in _NO_LOSS and count]
    return "; ".join(f"{count:,} {reason}" for reason, count in sorted(told, key=lambda each: -each[1]))


def is_hidden(path: str) -> bool:
    """Whether ``path`` is a copy or thumbnail that a desktop, a notebook or a disk station keeps beside images."""
    *folders, name = path.split("/")
    return any(part.startswith(".") for part in (*folders, name)) or (
        name in _SYSTEM_FILES or not _SYSTEM_FOLDERS.isdisjoint(folders)
    )


def refuse_file(url: str) -> None:
    """Raise UsageError if ``url`` is a file, or has a file's suffix. Called if there is no folder of that name."""
    suffix = posixpath.splitext(url.rstrip("/").lower())[1]
    if "*" in url:
        raise UsageError(f"{url} is a pattern, and a folder or a prefix of images is expected; give the folder.")
    if advice := _CONTAINERS.get(suffix):
        raise UsageError(f"{url} is a {suffix} file, and a folder or a prefix of images is expected; {advice}.")
    if suffix in SUFFIXES or os.path.isfile(url):
        kind = "one image" if suffix in SUFFIXES else "a file"
        raise UsageError(f"{url} is {kind}, and a folder or a prefix of images is expected; give the folder.")


def why_left_out(path: str) -> str | None:
    """Why a file is not used; None if it is taken for an image."""
    if is_hidden(path):
        return HIDDEN
    suffix = posixpath.splitext(path.lower())[1]
    if suffix in SUFFIXES:
        return None
    if suffix in _TABLES:
        return TABLES
    if suffix in _OTHER_FORMATS:
        return f"{suffix} files (not read; convert them to PNG or JPEG)"
    return f"{suffix} files" if suffix else "files without a suffix"


def _lfs_pointers(store: Store, images: Sequence[StoredObject]) -> set[str]:
    """The paths of files that only say which image Git LFS would put in their place."""
    short = [stored.path for stored in images if stored.size_bytes in _POINTER_BYTES]
    contents = zip(short, store.get_many(short), strict=True) if short else ()
    return {path for path, data in contents if isinstance(data, bytes) and data.startswith(_POINTER)}


def _no_images(listing: Listing) -> UsageError:
    if not listing.left_out:
        refuse_file(listing.url)
    suffixes = Counter({reason: count for reason, count in listing.counts.items() if reason != HIDDEN})
    suffixes = suffixes or Counter(listing.counts)
    others = ", ".join(f"{count:,} {reason}" for reason, count in suffixes.most_common(4))
    found = f"but {others}" if others else "nor other files"
    kinds = [posixpath.splitext(path)[1] for paths in listing.left_out.values() for path in paths[:1]]
    advice = next((f" {kind} files: {_CONTAINERS[kind]}." for kind in kinds if kind in _CONTAINERS), "")
    return UsageError(
        f"There are no images below {listing.url}, {found}; check the path, and that file names end in "
        f"{', '.join(SUFFIXES)}.{advice}"
    )


Part = Literal["train", "test"]

_OF_IMAGES = r"(set|data|images|imgs)?s?\d*"
_TRAIN = re.compile(r"(train|training)" + _OF_IMAGES)
_TEST = re.compile(r"(public|private)?(test|testing)" + _OF_IMAGES)
_VALIDATION = re.compile(r"(val|valid|validation|validate|eval|evaluation|dev|holdout|heldout)" + _OF_IMAGES)
_log = logging.getLogger("raytrain")
_BESIDE_CLASSES = re.compile(r"(jpeg)?images?|masks?|annotations?|labels?|trimaps?|segmentation.*")
_MASKS = ("_mask", "_seg", "_segmentation", "_gt")
_WORDS = re.compile(r"[ _.-]+")


@dataclass(frozen=True)
class FolderLabels:
    """The class and the part of each of N images, as their folders say."""

    classes: tuple[str, ...]  # (N,), empty if an image is in no class folder
    parts: tuple[str, ...] | None = None  # (N,), names of folders; None if there are no training and test images
    train: str = ""  # the folder of the training images
    test: str = ""  # the folder of the test images; others, such as val/ beside test/, are not used


def is_training(name: str) -> bool:
    """Whether a folder, a file or a value of this name is of training images."""
    return _is(_TRAIN, name)


def is_test(name: str) -> bool:
    """Whether a folder, a file or a value of this name is of test or validation images."""
    return _is(_TEST, name) or _is(_VALIDATION, name)


def is_part(name: str) -> bool:
    """Whether a folder, a file or a value of this name is of training, test or validation images."""
    return is_training(name) or is_test(name)


def test_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names to test on: those of test images, else those of validation images."""
    ordered = sorted(set(names))
    of_kinds = (tuple(name for name in ordered if _is(kind, name)) for kind in (_TEST, _VALIDATION))
    return next(filter(None, of_kinds), ())


def read_folders(keys: Sequence[str], url: str) -> FolderLabels:
    """The classes and parts of the images ``keys``, paths below ``url``; UsageError if they are ambiguous."""
    composed = (unicodedata.normalize("NFC", key) for key in keys)  # a Mac writes é as two characters, others as one
    _tell_masks(keys, url)
    paths = _below_shared_folders([tuple(key.split("/")[:-1]) for key in composed])
    tops = {path[0] for path in paths if path}
    if split := _by_top_folder(paths, tops, url):
        return split
    if split := _by_second_folder(paths, url):
        return split
    _refuse_repeated(paths, tops, url)
    for name in sorted(
        top for top in tops if len(tops) > 1 and (is_part(top) or _BESIDE_CLASSES.fullmatch(top.lower()))
    ):
        _log.warning("%s/ in %s is taken for a class of this name, beside %s others.", name, url, len(tops) - 1)
    return FolderLabels(tuple(path[0] if path else "" for path in paths))


def check_classes(found: tuple[str, ...], classes: tuple[str, ...] | None, url: str, num_images: int) -> None:
    """Raise UsageError unless ``found`` are classes to train on, or, if ``classes`` is given, are some of those."""
    if not found:
        raise UsageError(
            f"The {num_images:,} images below {url} are not in class folders; put each class into a folder of "
            f"its name, such as {url.rstrip('/')}/cat/, or give a label file with --labels."
        )
    if classes is None and len(found) == 1:
        raise UsageError(
            f"All {num_images:,} images below {url} are of one class, {found[0]!r}; a classifier needs at "
            "least two classes."
        )
    if unknown := sorted(set(found) - set(classes or found)):
        raise UsageError(
            f"{url} has {len(unknown):,} classes that the training images lack: {first_names(unknown)} (those "
            f"have {first_names(classes or ())}); rename or remove them."
        )


def tell_alike(classes: Sequence[str], url: str) -> None:
    """Log which classes differ in upper and lower case only."""
    counts = Counter(map(str.casefold, classes))
    if alike := [name for name in classes if counts[name.casefold()] > 1]:
        _log.warning("The classes %s of %s differ in upper and lower case only.", first_names(alike), url)


def first_names(names: Sequence[str]) -> str:
    """The first five of ``names``."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _is(kind: re.Pattern[str], name: str) -> bool:
    """Whether a word of ``name`` is of this kind, as in seg_train or Training Set."""
    return any(kind.fullmatch(word) for word in _WORDS.split(name.lower()))


def _tell_masks(keys: Sequence[str], url: str) -> None:
    """Log how many images are called like another one with _mask or the like behind its name."""
    stems = {posixpath.splitext(key)[0] for key in keys}
    masks = [
        key
        for key in keys
        if (stem := posixpath.splitext(key)[0]).endswith(_MASKS) and stem.rpartition("_")[0] in stems
    ]
    if masks:
        _log.warning(
            "%s images in %s look like masks of others, such as %s, and are used as images.",
            *(f"{len(masks):,}", url, masks[0]),
        )


def _below_shared_folders(paths: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The folders of each image without those that all images share, as long as each has another one below."""
    while paths and all(len(path) > 1 and path[0] == paths[0][0] for path in paths):
        paths = [path[1:] for path in paths]
    return paths


def _by_top_folder(paths: list[tuple[str, ...]], tops: set[str], url: str) -> FolderLabels | None:
    """Labels for train/cat and test/cat; None if there are no folders of training and test images with classes."""
    train = next((top for top in sorted(tops) if is_training(top)), None)
    test = next(iter(test_names(tops)), None)
    if train is None or test is None:
        return None
    others = sorted(top for top in tops if not is_part(top))
    below = [path[2:] if len(path) > 2 and path[1] == path[0] else path[1:] for path in paths]  # seg_train/seg_train
    in_train, in_test = (
        {rest[0] for path, rest in zip(paths, below, strict=True) if rest and path[0] == part} for part in (train, test)
    )
    if others and not in_train:
        return None  # classes may be called train and test: then the images are in them
    url = url.rstrip("/")
    if not in_train:
        raise UsageError(
            f"{url} contains {train}/ and {test}/ without class folders; put each class into a folder of its name, "
            f"or give {url}/{train} by itself and the classes with --labels."
        )
    num_tested = sum(path[:1] == (test,) for path in paths)
    num_direct = sum(path == (test,) for path in paths)
    if num_direct or in_train.isdisjoint(in_test):
        raise UsageError(
            f"{url} contains {train}/ with class folders and {test}/ with {num_direct or num_tested:,} images that are "
            f"in none; give --data {url}/{train}, of which --test-fraction is held out for testing."
        )
    if others:
        raise UsageError(
            f"{url} contains {train}/ and {test}/, and other folders, such as {others[0]}/, which would become one "
            f"data set; give --data {url}/{train} --test-data {url}/{test}."
        )
    parts = tuple(path[0] if path else "" for path in paths)
    return FolderLabels(tuple(path[0] if path else "" for path in below), parts, train, test)


def _by_second_folder(paths: list[tuple[str, ...]], url: str) -> FolderLabels | None:
    """Labels for cat/train and cat/test; None if the folders in the top folders are anything else."""
    seconds = {path[1] for path in paths if len(path) > 1}
    trains, test = sorted(filter(is_training, seconds)), next(iter(test_names(seconds)), None)
    if not trains or test is None or not all(map(is_part, seconds)):
        return None
    if num_direct := sum(len(path) == 1 for path in paths):
        raise UsageError(
            f"The class folders of {url} contain {trains[0]}/ and {test}/, and {num_direct:,} images beside these; "
            "move each image into one of them, or give --labels."
        )
    parts = tuple(path[1] if len(path) > 1 else "" for path in paths)
    return FolderLabels(tuple(path[0] if path else "" for path in paths), parts, trains[0], test)


def _refuse_repeated(paths: list[tuple[str, ...]], tops: set[str], url: str) -> None:
    """Raise UsageError if all top folders hold the same folders, which may be the classes, and nothing else."""
    if len(tops) < 2 or any(len(path) < 2 for path in paths):
        return
    below = {top: {path[1] for path in paths if path[0] == top} for top in tops}
    first, *rest = (below[top] for top in sorted(tops))
    if len(first) > 1 and all(each == first for each in rest):
        raise UsageError(
            f"The folders {first_names(sorted(tops))} of {url} all contain {first_names(sorted(first))}, so that "
            "either may be the classes; give the folder of one of them, or a label file with --labels."
        )


def _lost_classes(files: Listing, folders: FolderLabels) -> list[str]:
    """The folders beside the class folders of which all files are left out."""
    paths = (path for reason, left_out in files.left_out.items() if reason not in _NO_LOSS for path in left_out)
    lost = {path.rpartition("/")[0] for path in paths}
    kept = {stored.path.rpartition("/")[0] for stored in files.images}
    beside = {folder.rpartition("/")[0] for folder in kept}
    return sorted(folder for folder in lost - kept if folder and folder.rpartition("/")[0] in beside)
