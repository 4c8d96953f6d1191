"""Images by their folders, whose names say the class of each, and which are training and which are validation images.

An image's class is the topmost folder that it is in, as for torchvision and Keras: a class folder may hold other
folders. Folders that all images share are no classes. Images in ``train/`` and ``test/``, or under names like these,
are training and validation images, whether the classes are below them (``train/cat``) or above them (``cat/train``).

A tree of folders does not say which of these it is, so :func:`read_folders` looks for signs in this order: parts at
the top, parts below the classes, and then classes at the top. Where two readings are possible, a wrong one would train
without a word on wrong labels; so it refuses what is ambiguous, and logs what it takes for granted. Folders that are
probably no classes are found by :mod:`raytrain.data.labels.doubtful_folders`.
"""

from __future__ import annotations

import logging
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raytrain.data.labels.class_names import check_classes, composed, plain_booleans, report_alike
from raytrain.data.labels.doubtful_folders import (
    below_shared_folders,
    check_alphabet,
    check_linked_classes,
    check_parts,
    check_repeated,
    check_top_names,
    is_beside_classes,
    report_doubtful,
    report_folders_below,
    report_masks,
)
from raytrain.data.labels.label_formats import KEY_COLUMNS, LABEL_COLUMNS, METADATA, read_table
from raytrain.data.labels.listing import TABLES, Listing, first_names, list_files, report_left_out
from raytrain.data.labels.manifest import Manifest, open_packed, unlabelled
from raytrain.data.labels.part_names import (
    HELD_OUT,
    Part,
    is_bare_part,
    is_held_out,
    is_part,
    is_training,
    names_of_parts,
    numbered_names,
    part_like,
    parts_among,
)
from raytrain.errors import UsageError, format_count
from raytrain.storage.store import Store

_log = logging.getLogger("raytrain")
_STRAY = "images outside of class folders"
_ROW_TABLES = (".csv", ".tsv")
_LISTS = (".txt", ".json", ".jsonl", ".parquet")  # that are named if they are called as parts are
_MOST_TABLES = 3  # that are opened to see whether they are label files


def build_manifests(store: Store) -> dict[Part, Manifest]:
    """Return the images below ``store``: all as training images, or those of each part that has folders of its own.

    Log which folder was taken for which part. Raises the same as :func:`build_manifest`.
    """
    # Packed images, and those in class folders alone, are all training images.
    packed = open_packed(store)
    if packed is not None:
        return {"train": _relabelled(packed, None)}
    files = list_files(store)
    _check_tables_below(files)
    folders = read_folders([stored.path for stored in files.images], store.url)
    if folders.parts is None:
        return {"train": _label_by_folder(files, folders, None, None)}

    # The classes are those of the training images. Say which folder was taken for which part: it is a guess.
    train = _label_by_folder(files, folders, None, "train")
    parts: dict[Part, Manifest] = {"train": train}
    parts |= {
        part: _label_by_folder(files, folders, train.classes, part) for part in HELD_OUT if part in folders.folder_of
    }
    uses: dict[Part, str] = {"train": "training", "validation": "validating", "test": "testing at the end"}
    if len(parts) == 2:
        uses["test"] = "validating"  # they choose the best checkpoint, and so are no test
    shown = [f"{uses[part]} on {len(images):,} in {folders.folder_of[part]}/" for part, images in parts.items()]
    _log.warning("The images of %s: %s.", store.url, ", ".join(shown))
    return parts


def build_manifest(store: Store, classes: tuple[str, ...] | None = None, part: Part | None = None) -> Manifest:
    """Return the images below ``store``, labelled by their folders, or packed ones.

    Example: ``build_manifest(open_store("s3://photos/flowers"))``.

    Args:
        store: the folder or S3 prefix to list.
        classes: the classes that the labels index; by default the folders' names, sorted. For validation images, pass
            those of the training images; the validation images may lack some of them.
        part: which images to take if there are folders of training and of validation images; None refuses these.

    Raises:
        StorageError: the store cannot be listed.
        UsageError: there are no images, no class folders, only one class, classes that are not in ``classes``, or both
            training and validation images.
    """
    packed = open_packed(store)
    if packed is not None:
        return _relabelled(packed, classes)
    files = list_files(store)
    _check_tables_below(files)
    folders = read_folders([stored.path for stored in files.images], store.url)
    if folders.parts is None:
        return _label_by_folder(files, folders, classes, part)

    # Take the folder of the part, or of the other held-out part.
    used = part and part_like(part, folders.folder_of)
    if used is None:
        url, (first, second, *_) = store.url.rstrip("/"), folders.folder_of.values()
        raise UsageError(
            f"{url} contains {first}/ and {second}/, which would become one data set; give each by itself, such as "
            f"{url}/{first}."
        )
    _log.warning("Of %s, only the images in %s/ are used.", store.url, folders.folder_of[used])
    return _label_by_folder(files, folders, classes, used)


def _check_tables_below(files: Listing) -> None:
    """Raise UsageError if a label file such as site_A/metadata.csv gives the images of one folder several classes.

    Only label files directly below ``--data`` are read, and without one the folders would become the classes. Log the
    tables and lists at most one folder below ``--data`` that are not read because of their names, and annotations of
    each image.
    """
    # Tables of other names may be anything, and lists such as meta/train.txt say what is held out: they are only named.
    # So are those one folder below, unless that is a class.
    with_images = {image.path.rpartition("/")[0] for image in files.images} if files.left_out[TABLES] else set[str]()
    unread = list[str]()
    for path in files.left_out[TABLES]:
        folder, _, name = path.rpartition("/")
        stem, suffix = posixpath.splitext(name.lower())
        if "/" in folder or (folder in with_images and folder and not is_part(folder)):
            continue
        if (suffix in _ROW_TABLES and name not in METADATA) or (suffix in _LISTS and is_part(stem)):
            unread.append(path)
    if unread:
        sentence = "Not read beside the images of %s: %s. If it says their classes, give it with --labels"
        several = ", and those of held-out images with --validation-labels and --test-labels" if len(unread) > 1 else ""
        _log.warning(f"{sentence}{several}.", files.url, first_names(sorted(unread)))

    # So are files that are called like the images, as annotations of detections and captions are.
    names = {posixpath.basename(image.path) for image in files.images} if files.left_out[TABLES] else set[str]()
    names |= {posixpath.splitext(name)[0] for name in names}
    named_alike = [path for path in files.left_out[TABLES] if posixpath.splitext(posixpath.basename(path))[0] in names]
    if 2 * len(named_alike) >= len(files.images):
        sentence = "Not read below %s: %s files that are called like its images, such as %s. If they say the classes, "
        advice = "write a label file of them, and give it with --labels."
        _log.warning(sentence + advice, files.url, f"{len(named_alike):,}", min(named_alike))

    # Tables of the names that are read, in folders where they are not.
    tables = sorted(path for path in files.left_out[TABLES] if posixpath.basename(path) in METADATA)
    url = files.url.rstrip("/")
    for path in tables[:_MOST_TABLES]:
        folder = posixpath.dirname(path)
        classes = _classes_in_table(f"{url}/{path}") if folder else set[str]()
        if len(classes) < 2:
            continue

        # Several classes in one folder: its name is none of them. Say what to give in place of --data.
        parts = parts_among(map(posixpath.dirname, tables))
        options = f"--data {url}/{next(filter(is_training, parts), folder)}"
        if held_out := sorted(filter(is_held_out, parts)):
            options += f" --validation-data {url}/{held_out[-1]}"
        raise UsageError(
            f"{url}/{path} has labels, such as {min(classes)!r}, and only a label file directly below --data is "
            f"read; give {options}, or one label file of all images with --labels, or remove it."
        )


def _classes_in_table(place: str) -> set[str]:
    """Return the classes that the table at ``place`` gives its rows; none if it is no label file."""
    try:
        table = read_table(place, {*KEY_COLUMNS}, {*LABEL_COLUMNS})
    except UsageError:  # a file of something else
        return set()
    column_of = {name.lower(): index for index, name in enumerate(table.column_names)}
    label = next((column_of[name] for name in LABEL_COLUMNS if name in column_of), None)
    if label is None or column_of.keys().isdisjoint(KEY_COLUMNS):
        return set()
    return set(map(str, table[label].drop_null().to_pylist())) - {""}


def _relabelled(packed: Manifest, classes: tuple[str, ...] | None) -> Manifest:
    """Return packed images with labels that index ``classes``, or their own classes if it is None.

    Raises UsageError if they have a class that ``classes`` lacks, or, without it, only one class.
    """
    check_classes(packed.classes, classes, packed.url, len(packed))
    index = {name: label for label, name in enumerate(classes or packed.classes)}
    label_of = np.array([index[name] for name in packed.classes], np.int32)
    return replace(packed, labels=label_of[packed.labels], classes=classes or packed.classes)


@dataclass(frozen=True)
class FolderLabels:
    """The class and the part of each of N images, according to their folders."""

    classes: tuple[str, ...]  # (N,), empty if an image is in no class folder
    parts: tuple[str, ...] | None = None  # (N,), names of folders; None if no folders are of parts
    folder_of: Mapping[Part, str] = field(default_factory=dict)  # the folder of each part; others are not used


def read_folders(keys: Sequence[str], url: str) -> FolderLabels:
    """Return the classes and parts of the images ``keys``, paths below ``url``, by their folders.

    Log what is taken for granted; raise UsageError if the folders can be read in several ways.

    >>> read_folders(["cat/1.png", "dog/2.png"], "pets").classes
    ('cat', 'dog')
    """
    report_masks(keys, url)
    all_folders = [tuple(composed(key).split("/")[:-1]) for key in keys]
    paths = below_shared_folders(all_folders)
    if paths:  # sentences name folders below the one that all images share
        url = "/".join([url.rstrip("/"), *all_folders[0][: len(all_folders[0]) - len(paths[0])]])
    tops = {path[0] for path in paths if path}

    # Archives unpack as seg_train/seg_train/cat: skip a folder that all images of the one above it are in, by its name.
    doubled = set(filter(is_part, tops)) - {path[0] for path in paths if path[:1] != path[1:2]}
    paths = [path[1:] if path and path[0] in doubled else path for path in paths]
    check_top_names(keys, paths, tops, url)

    # The folders may be train/cat, or else cat/train, or else cat alone.
    labels = _parts_above_classes(paths, tops, url) or _parts_below_classes(paths, url)
    if labels is None:
        check_parts(paths, tops, url)
        check_alphabet(paths, url)
        check_repeated(paths, url)
        labels = FolderLabels(tuple(path[0] if path else "" for path in paths))
    labels = replace(labels, classes=tuple(plain_booleans(labels.classes)))
    classes = set(labels.classes) - {""}
    if classes and all(map(is_beside_classes, classes)):
        with_folders = sorted({path[0] for path in paths if len(path) > 1} & classes)
        advice = f"give --data {url}/{with_folders[0]}, if the classes are in it, " if with_folders else ""
        raise UsageError(
            f"There are no class folders below {url}, only {', '.join(f'{name}/' for name in sorted(classes))}; "
            f"{advice}put each class into a folder of its name, or give a label file with --labels."
        )
    report_doubtful(classes, url)
    return labels


def top_folders(keys: Iterable[str]) -> list[str]:
    """Return the topmost folder of each key, below the folders that all keys share; empty for a key in no folder."""
    return [path[0] if path else "" for path in below_shared_folders([tuple(key.split("/")[:-1]) for key in keys])]


def _parts_above_classes(paths: list[tuple[str, ...]], tops: set[str], url: str) -> FolderLabels | None:
    """Return labels for train/cat and test/cat; None if the top folders are not of both, or are classes themselves.

    ``paths`` are the folders of each image, ``tops`` the first ones of these. Raises UsageError if the parts have no
    classes or different ones, or other folders are beside them.
    """
    # There must be a folder of training images, and one or two of held-out images.
    names_of = names_of_parts(tops)
    folder_of: dict[Part, str] = {part: names[0] for part, names in names_of.items()}
    held_out = [folder_of[part] for part in HELD_OUT if part in folder_of]
    if "train" not in folder_of or not held_out:
        return None
    train, last = folder_of["train"], held_out[-1]
    url = url.rstrip("/")
    options = _options_of_parts(url, folder_of)

    # A large part may come in numbered folders, such as train.X1 and train.X2: all are used, under the first name.
    parts = [path[0] if path else "" for path in paths]
    if numbered := numbered_names(names_of):
        _log.warning("The folders %s of %s are used as one, %s/.", first_names(numbered), url, numbered[0])
        parts = [numbered[0] if part in numbered else part for part in parts]
    elif len(names_of["train"]) > 1 and not any(map(is_bare_part, names_of["train"])):
        raise UsageError(
            f"{url} contains several folders of training images, {first_names(names_of['train'])}; put the images to "
            f"train on into one of them, or give {options}."
        )

    # Their classes are the folders in them, below those that all images share, as in train/images/cat.
    below_parts = below_shared_folders([path[1:] for path in paths])
    below_of: dict[str, list[tuple[str, ...]]] = {folder: [] for folder in (train, *held_out)}
    for part, below in zip(parts, below_parts, strict=True):
        if part in below_of:
            below_of[part].append(below)
    classes = {below[0] for below in below_of[train] if below}

    # "train" and "test" may be classes, such as of vehicles. Then other classes are beside them, and most of their
    # images are directly in them.
    beside_parts = sorted(top for top in tops if not is_part(top))
    if beside_parts and (not classes or 2 * below_of[train].count(()) > len(below_of[train])):
        return None

    # So they are parts. All must hold the same classes. A held-out part without them, such as test images whose labels
    # a competition keeps for itself, is left out if another one has them.
    if all(map(is_beside_classes, classes)):  # or there are none
        raise UsageError(
            f"{url} contains {train}/ and {last}/ without class folders; put each class into a folder of its name, "
            f"or give {options} and the classes with --labels or --label-pattern. Omit the option for a folder whose "
            "labels are not known."
        )
    problem_of = {folder: _problem_of_part(below_of, train, folder, url) for folder in held_out}
    if all(problem_of.values()):
        raise UsageError(problem_of[last])
    unusable = [folder for folder, problem in problem_of.items() if problem]
    for folder in unusable:
        num_images = format_count(len(below_of[folder]), "image")
        _log.warning("Not used of %s: %s in %s/, in none of the class folders of %s/.", url, num_images, folder, train)
    check_alphabet(below_of[train], url)
    report_folders_below(below_of[train], f"{url}/{train}")

    # And no other folder may be beside them.
    if beside_parts:
        raise UsageError(
            f"{url} contains {train}/ and {last}/, and other folders, such as {beside_parts[0]}/, which would become "
            f"one data set; give {options}."
        )
    return FolderLabels(
        classes=tuple(below[0] if below else "" for below in below_parts),
        parts=tuple(parts),
        folder_of={part: folder for part, folder in folder_of.items() if folder not in unusable},
    )


def _options_of_parts(url: str, folder_of: Mapping[Part, str]) -> str:
    """Return the options that name the folder of each part; of two parts, the held-out one is for validation."""
    option_of = {"train": "--data", "validation": "--validation-data", "test": "--test-data"}
    if "validation" not in folder_of:
        option_of["test"] = "--validation-data"
    return " ".join(f"{option_of[part]} {url}/{folder}" for part, folder in folder_of.items())


def _problem_of_part(
    below_of: Mapping[str, Sequence[tuple[str, ...]]], train: str, folder: str, url: str
) -> str | None:
    """Return a sentence if a held-out ``folder`` has images in no class, or only in classes that ``train`` lacks.

    Return None if it can be used. ``below_of`` has, by part, the folders of each image below that of the part.
    """
    # Usually, the folder has class folders that are also in train, and no image outside of these.
    num_direct = below_of[folder].count(())
    in_train, in_folder = ({below[0] for below in below_of[part] if below} for part in (train, folder))
    if not num_direct and not in_train.isdisjoint(in_folder):
        return None

    # Folders of other names are other classes, unless they are called images or masks: then the images have no class.
    if not num_direct and not all(map(is_beside_classes, in_folder)):
        return (
            f"{url} contains {train}/ with the classes {first_names(sorted(in_train))} and {folder}/ with others, "
            f"{first_names(sorted(in_folder))}; call the same classes alike, or give --data {url}/{train}."
        )
    num_images = num_direct or len(below_of[folder])
    return (
        f"{url} contains {train}/ with class folders and {folder}/ with {format_count(num_images, 'image')} in no "
        f"class folder; give --data {url}/{train}, of which --validation-fraction is held out."
    )


def _parts_below_classes(paths: list[tuple[str, ...]], url: str) -> FolderLabels | None:
    """Return labels for class folders that contain parts, as in cat/train and cat/test; None for any other layout.

    Raises UsageError if some images are beside the folders of parts, or all classes hold the same folders.
    """
    # All folders in the topmost ones must be parts. One class may have train/ where another has Train/: they are the
    # same part, called by the spelling that sorts first.
    second_folders = {path[1] for path in paths if len(path) > 1}
    spelling_of = {folder.lower(): folder for folder in sorted(second_folders, reverse=True)}
    folder_of: dict[Part, str] = {part: names[0] for part, names in names_of_parts(spelling_of.values()).items()}
    if len(folder_of) < 2 or "train" not in folder_of:
        return None
    train, *_, last = folder_of.values()
    if no_parts := sorted(folder for folder in second_folders if not is_part(folder)):
        if all(map(is_beside_classes, no_parts)):
            raise UsageError(
                f"The class folders of {url} contain {train}/ and {last}/, and also {first_names(no_parts)}, which "
                "would become images of the classes; move these to another place."
            )
        sentence = "%s/ and %s/ in the topmost folders of %s do not say what is held out: there are images in %s/, too."
        _log.warning(sentence, train, last, url, no_parts[0])
        return None

    # Then all images must be in one of them.
    if num_direct := sum(len(path) == 1 for path in paths):
        raise UsageError(
            f"The class folders of {url} contain {train}/ and {last}/, and {format_count(num_direct, 'image')} beside "
            "these; move each image into one of them, or give --labels."
        )
    check_repeated([path[:1] + path[2:] for path in paths], url, without="(?P<split>[^/]+)/")
    parts = tuple(spelling_of[path[1].lower()] if len(path) > 1 else "" for path in paths)
    return FolderLabels(tuple(path[0] if path else "" for path in paths), parts, folder_of)


def _label_by_folder(
    files: Listing, folders: FolderLabels, classes: tuple[str, ...] | None, part: Part | None
) -> Manifest:
    """Return the images of one part, or of all parts if ``part`` is None, labelled by their folders.

    Labels index ``classes``, by default the names of the folders. Log what is left out, once for all parts. Raises
    UsageError as :func:`check_classes` does.
    """
    if part not in HELD_OUT:  # once, for all parts are in one listing
        check_linked_classes(files, folders.classes)

    # Images in no class folder, and those of other parts, are left out.
    chosen = np.array(folders.classes, object) != ""
    files.left_out[_STRAY] = [files.images[index].path for index in np.flatnonzero(~chosen)]
    if folders.parts is not None and part is not None:
        unused = chosen & (np.array(folders.parts, object) != folders.folder_of[part])
        counts = Counter(folders.parts[index] for index in np.flatnonzero(unused))
        unused_folders = sorted(counts.keys() - {*folders.folder_of.values()})
        texts = [f"{format_count(counts[name], 'image')} in {name}/" for name in unused_folders]
        if texts and part == "train":
            _log.warning("Not used of %s: %s.", files.url, ", ".join(texts))
        chosen &= ~unused
    if part not in HELD_OUT:  # once, for all parts are in one listing
        report_alike(sorted(set(folders.classes)), files.url)
        report_left_out(files, in_class_folders=True)

    # Labels index the classes: those given, or else all that there are.
    names = [folders.classes[index] for index in np.flatnonzero(chosen)]
    present = tuple(sorted(set(names)))
    check_classes(present, classes, files.url, len(names) or len(files.images))
    label_of = {name: label for label, name in enumerate(classes or present)}
    images = unlabelled(files).select(np.flatnonzero(chosen))
    labels = np.array([label_of[name] for name in names], np.int32)
    return replace(images, labels=labels, classes=classes or present, left_out=files.counts)
