"""Classes of images, and the split into training and test images, by the names of their folders.

An image's class is the topmost folder that it is in, as for torchvision and Keras: a class folder may hold other
folders. Folders that all images share are no classes. Images in ``train/`` and ``test/``, or under names like these,
are training and test images, whether the classes are below them (``train/cat``) or above them (``cat/train``).
"""

from __future__ import annotations

import logging
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from raytrain.data.labels.listing import Listing, lost_files
from raytrain.errors import UsageError

Part = Literal["train", "test"]

_OF_IMAGES = r"(set|data|images|imgs)?s?\d*[ab]?"  # trainA and trainB are of two kinds of images, as for CycleGAN
_TRAIN = re.compile(r"(train|training)" + _OF_IMAGES)
_TEST = re.compile(r"(public|private)?(test|testing)" + _OF_IMAGES)
_VALIDATION = re.compile(r"(val|valid|validation|validate|eval|evaluation|dev|holdout|heldout)" + _OF_IMAGES)
_log = logging.getLogger("raytrain")
_BESIDE_CLASSES = re.compile(r"(jpeg)?images?|masks?|annotations?|labels?|trimaps?|segmentation.*|unlabell?ed|unsup.*")
_NUMBERED_PART = re.compile(r"(.*[ _.-])?(k?fold|cv|split|part|batch|chunk|images?)[ _.-]?\d+")
_MASKS = ("_mask", "_seg", "_segmentation", "_gt")
_SIGNS = re.compile(r"[\W_]+")
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
    _refuse_numbered_parts(tops, url)
    found = _by_top_folder(paths, tops, url) or _by_second_folder(paths, url)
    if found is None:
        _check_repeated(paths, url)
        found = FolderLabels(tuple(path[0] if path else "" for path in paths))
    classes = set(found.classes) - {""}
    doubtful = sorted(name for name in classes if is_part(name) or _BESIDE_CLASSES.fullmatch(name.lower()))
    for name in doubtful if len(classes) > 1 else ():
        _log.warning("%s/ in %s is taken for a class of this name, beside %s others.", name, url, len(classes) - 1)
    return found


def top_folders(keys: Iterable[str]) -> list[str]:
    """The topmost folder of each key, but for folders that all share; empty for a key in none."""
    return [path[0] if path else "" for path in _below_shared_folders([tuple(key.split("/")[:-1]) for key in keys])]


def parts_among(names: Iterable[str]) -> list[str]:
    """The names of training and test images, sorted; none unless there are some of each."""
    parts = sorted(filter(is_part, set(names)))
    return parts if {True, False} == set(map(is_training, parts)) else []


def check_classes(found: tuple[str, ...], classes: tuple[str, ...] | None, url: str, num_images: int) -> None:
    """Raise UsageError unless ``found`` are classes to train on, or, if ``classes`` is given, are some of those."""
    if not found:
        raise UsageError(
            f"The {num_images:,} images below {url} are not in class folders; put each class into a folder of "
            f"its name, such as {url.rstrip('/')}/cat/, or give a label file with --labels."
        )
    if classes is None and len(found) == 1:
        raise UsageError(
            f"All {num_images:,} images below {url} are of one class, {found[0]!r}; a classifier needs at least two "
            "classes: put each into a folder of its name, or give a label file with --labels."
        )
    if unknown := sorted(set(found) - set(classes or found)):
        raise UsageError(
            f"{url} has {len(unknown):,} classes that the training images lack: {first_names(unknown)} (those "
            f"have {first_names(classes or ())}); rename or remove them."
        )


def tell_left_out(listing: Listing, folders: FolderLabels | None = None) -> None:
    """Log how many files are left out and why, but not hidden files and tables; classes without images; equal ones."""
    tell_alike(sorted(set(folders.classes)) if folders else (), listing.url)
    reasons = lost_files(listing.counts)
    if not reasons:
        return
    lost = first_names([] if folders is None else list(map(repr, _lost_classes(listing))))
    _log.warning("Left out below %s: %s.%s", listing.url, reasons, f" No image is left in {lost}." if lost else "")


def tell_alike(classes: Sequence[str], url: str) -> None:
    """Log which classes differ in upper and lower case, or in signs, only."""
    plain = {name: _SIGNS.sub(" ", name.casefold()).strip() or name for name in classes}
    counts = Counter(plain.values())
    if alike := [repr(name) for name in classes if counts[plain[name]] > 1]:
        _log.warning("The classes %s of %s are called nearly alike.", first_names(alike), url)


def first_names(names: Sequence[str]) -> str:
    """The first five of ``names``."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _is(kind: re.Pattern[str], name: str) -> bool:
    """Whether a word of ``name`` is of this kind, as in seg_train or Training Set."""
    return any(kind.fullmatch(word) for word in _WORDS.split(name.lower()))


def _tell_masks(keys: Sequence[str], url: str) -> None:
    """Log how many images are called like another one with _mask or the like behind its name."""
    endings = [key for key in keys if posixpath.splitext(key)[0].endswith(_MASKS)]
    stems = {posixpath.splitext(key)[0] for key in keys if endings}
    if masks := [key for key in endings if key.rpartition("_")[0] in stems]:
        sentence = "%s images in %s look like masks of others, such as %s, and are used as images."
        _log.warning(sentence, f"{len(masks):,}", url, masks[0])


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
    below = _below_shared_folders(below)  # train/images/cat
    in_train, in_test = (
        {rest[0] for path, rest in zip(paths, below, strict=True) if rest and path[0] == part} for part in (train, test)
    )
    num_below = sum(path[:1] == (train,) and len(path) > 1 for path in paths)
    if others and (not in_train or num_below < sum(path == (train,) for path in paths)):
        return None  # classes may be called train and test: then most of their images are directly in them
    url = url.rstrip("/")
    if not in_train:
        raise UsageError(
            f"{url} contains {train}/ and {test}/ without class folders; put each class into a folder of its name, "
            f"or give --data {url}/{train} --test-data {url}/{test} and the classes with --labels."
        )
    num_tested = sum(path[:1] == (test,) for path in paths)
    num_direct = sum(path == (test,) for path in paths)
    if not num_direct and in_train.isdisjoint(in_test) and not all(map(_BESIDE_CLASSES.fullmatch, in_test)):
        raise UsageError(
            f"{url} contains {train}/ with the classes {first_names(sorted(in_train))} and {test}/ with others, "
            f"{first_names(sorted(in_test))}; call the same classes alike, or give --data {url}/{train}."
        )
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
    if not trains or test is None:
        return None
    if others := sorted(second for second in seconds if not is_part(second)):
        sentence = "Images in %s/ and %s/ below the topmost folders of %s are used alike, as there are others in %s/."
        _log.warning(sentence, trains[0], test, url, others[0])
        return None
    if num_direct := sum(len(path) == 1 for path in paths):
        raise UsageError(
            f"The class folders of {url} contain {trains[0]}/ and {test}/, and {num_direct:,} images beside these; "
            "move each image into one of them, or give --labels."
        )
    _check_repeated([path[:1] + path[2:] for path in paths], url)
    parts = tuple(path[1] if len(path) > 1 else "" for path in paths)
    return FolderLabels(tuple(path[0] if path else "" for path in paths), parts, trains[0], test)


def _refuse_numbered_parts(tops: set[str], url: str) -> None:
    if len(tops) > 1 and all(_NUMBERED_PART.fullmatch(top.lower()) for top in tops):
        raise UsageError(
            f"The folders {first_names(sorted(tops))} of {url} are numbered parts, as of a cross-validation, and no "
            "classes; put the class folders of those to train on into one folder, or give a label file with --labels."
        )


def _check_repeated(paths: list[tuple[str, ...]], url: str) -> None:
    """Tell if several top folders hold the same folders; UsageError if all do: either may be the classes."""
    tops = sorted({path[0] for path in paths if path})
    if len(tops) < 2 or any(len(path) < 2 for path in paths):
        return
    below = [{path[1] for path in paths if path[0] == top} for top in tops]
    counts = Counter(name for names in below for name in names)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if len(counts) > 1 and all(names == below[0] for names in below):
        raise UsageError(
            f"The folders {first_names(tops)} of {url} all contain {first_names(repeated)}, so that "
            "either may be the classes; give the folder of one of them, or a label file with --labels."
        )
    if len(counts) > 1 and repeated:
        sentence = "The folders %s of %s are taken for the classes; %s of %s folders below, such as %s, are in several."
        _log.warning(sentence, first_names(tops), url, f"{len(repeated):,}", f"{len(counts):,}", repeated[0])


def _lost_classes(files: Listing) -> list[str]:
    """The folders beside the class folders of which all files are left out."""
    lost = {path.rpartition("/")[0] for path in files.lost()}
    kept = {stored.path.rpartition("/")[0] for stored in files.images}
    beside = {folder.rpartition("/")[0] for folder in kept}
    return sorted(folder for folder in lost - kept if folder and folder.rpartition("/")[0] in beside)
