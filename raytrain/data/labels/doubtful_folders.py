"""Folders that are probably no classes: parts, masks, days of photographs, letters of an index, results of programs.

A run would train on them without a word. :func:`raytrain.data.labels.folders.read_folders` has them refused here, with
what to give in place of them, or, if they may be classes all the same, named in a line.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Sequence

from raytrain.data.labels.listing import Listing, first_names
from raytrain.data.labels.part_names import is_part, is_training, parts_among
from raytrain.errors import UsageError

_log = logging.getLogger("raytrain")
# Folders of these names are probably no classes, but hold the images or masks of a data set, or parts of it.
_BESIDE_CLASSES = re.compile(
    r"(jpeg)?images?|jpe?g|png|imgs?|masks?|ground[ _-]?truths?|annotations?|labels?|trimaps?|segmentation.*|"
    r"unlabell?ed|no[ _-]?labels?|unsup.*"
)
# Folders of these names hold what programs write and people put beside the classes, so a line names them.
_HARDLY_CLASSES = re.compile(
    r"plots?|figures?|results?|outputs?|predictions?|visuali[sz]ations?|previews?|screenshots?|thumb(nail)?s?|logs?|"
    r"runs?|models?|weights|checkpoints?|docs?|src|code|notebooks?|data(set)?s?|te?mp|backups?|samples?|examples?|"
    r"raw|originals?|processed|augmented|cropped|resized|labell?ed|(images?|imgs?|photos?|pictures?)([ _-].*)?"
)
# Beside parts, folders of these names are parts, too, as of Market-1501 and of SVHN.
_OTHER_PARTS = re.compile(r"query|gallery|distractors?|extras?|additional|gt_.+")
_NUMBERED_PART = re.compile(r"(.*[ _.-])?(k?fold|cv|split|part|batch|chunk|images?)[ _.-]?\d+")
# Cameras make folders such as 100CANON, and programs for photographs those of a day or a month.
_OF_CAMERA = re.compile(
    r"[1-9]\d\d([A-Z_]{4}[A-Z0-9_]|ND\d{3})|"
    r"(19|20)\d\d(?P<sign>[-_. ]?)(0[1-9]|1[0-2])((?P=sign)(0[1-9]|[12]\d|3[01]))?"
)
_HASH = re.compile(r"[0-9a-f]{8,}")
_MASKS = ("_mask", "_seg", "_segmentation", "_gt", "_label", "_depth")


def report_masks(keys: Sequence[str], url: str) -> None:
    """Log how many of the images ``keys`` look like masks of a segmentation, or maps of depth, of others.

    They lie beside their images, as 1_mask.png beside 1.png, or in another folder, as Label/1_label.png does.
    """
    may_be_masks = [key for key in keys if posixpath.splitext(key)[0].endswith(_MASKS)]
    stems = {posixpath.splitext(posixpath.basename(key))[0] for key in keys} if may_be_masks else set[str]()
    if masks := [key for key in may_be_masks if posixpath.basename(key).rpartition("_")[0] in stems]:
        sentence = "Images that look like masks of others are used as images: %s in %s, such as %s."
        _log.warning(sentence, f"{len(masks):,}", url, masks[0])


def is_beside_classes(name: str) -> bool:
    """Return True if a folder of this name is probably no class, but holds all images of a data set, or masks."""
    return _BESIDE_CLASSES.fullmatch(name.lower()) is not None


def check_top_names(keys: Sequence[str], paths: list[tuple[str, ...]], tops: set[str], url: str) -> None:
    """Raise UsageError if the names of all top folders say that these are no classes.

    They are numbered parts, or those that a camera or a program makes: by days, or by the first signs of the files.
    """
    if len(tops) < 2:
        return
    pattern = _pattern_of_parts(tops) if all(len(path) == 1 for path in paths) else None
    if pattern is not None:
        raise UsageError(
            f"The folders {first_names(sorted(tops))} of {url} say the class and the part of their images; give "
            f"--label-pattern '{pattern}'."
        )
    if all(_NUMBERED_PART.fullmatch(top.lower()) for top in tops):
        raise UsageError(
            f"The folders {first_names(sorted(tops))} of {url} are numbered parts, as of a cross-validation, and no "
            "classes; put the class folders of those to train on into one folder, or give a label file with --labels."
        )
    has_signs_of_files = (
        all(len(top) <= 3 for top in tops)
        and not all(map(str.isdecimal, tops))
        and all(
            path and _HASH.fullmatch(name := key.rpartition("/")[2].partition(".")[0]) and name.startswith(path[0])
            for key, path in zip(keys, paths, strict=True)
        )
    )
    if has_signs_of_files or all(map(_OF_CAMERA.fullmatch, tops)):
        reason = (
            "have the first signs of their files' names" if has_signs_of_files else "are named by a camera or by dates"
        )
        raise UsageError(
            f"The folders {first_names(sorted(tops))} of {url} {reason}, and are no classes; put each class into a "
            "folder of its name, or give a label file with --labels."
        )


def _pattern_of_parts(names: Collection[str]) -> str | None:
    """Return the --label-pattern for folders whose names say the class and the part, such as cat_train and cat_test.

    Return None unless a part is the last word of all names, or the first word of all, and there are several classes,
    all with training images, or all with images of one part.

    >>> _pattern_of_parts(["cat_train", "cat_test", "dog_train"])
    '(?P<label>[^/]+)[ _.-](?P<split>test|train)/'
    >>> _pattern_of_parts(["training_real", "training_fake"])
    '(?:^|/)training[ _.-](?P<label>[^/]+)/'
    """
    for divide, pattern in (
        (r"(?P<label>.+)[ _.-](?P<part>.+)", "(?P<label>[^/]+)[ _.-]{}/"),
        (r"(?P<part>.+?)[ _.-](?P<label>.+)", "(?:^|/){}[ _.-](?P<label>[^/]+)/"),
    ):
        pairs = [(match["part"], match["label"]) for match in (re.fullmatch(divide, name) for name in names) if match]
        parts, classes = {part for part, _ in pairs}, {label for _, label in pairs}
        if len(pairs) < len(names) or len(classes) < 2 or not all(map(is_part, parts)):
            continue
        if all(label.isdecimal() or _NUMBERED_PART.fullmatch(label.lower()) for label in classes):
            return None
        if len(parts) == 1:
            return pattern.format(*parts)
        have_training = classes == {label for part, label in pairs if is_training(part)}
        if parts_among(parts) and have_training:
            return pattern.format(f"(?P<split>{'|'.join(sorted(parts))})")
    return None


def below_shared_folders(paths: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the folders of each image without the leading ones that all share; every image keeps at least one."""
    while paths and all(len(path) > 1 and path[0] == paths[0][0] for path in paths):
        paths = [path[1:] for path in paths]
    return paths


def check_parts(paths: list[tuple[str, ...]], tops: set[str], url: str) -> None:
    """Raise UsageError if top folders are parts: all by their names, as bounding_box_train/ and gallery/ are, or one
    that holds class folders, as in train/cat, train/dog and predict/, or in birds/cat, birds/dog and test/.
    """
    names = sorted(tops - {""})
    if len(names) < 2 or not any(map(is_part, names)):
        return

    # The folder to train on is the one of training images, or the only one that is no part, or else a part.
    others = [name for name in names if not is_part(name) and not _OTHER_PARTS.fullmatch(name.lower())]
    candidates = others if len(others) == 1 else filter(is_part, names)
    part = next(filter(is_training, names), next(iter(candidates)))
    below = below_shared_folders([path[1:] for path in paths if path[:1] == (part,)])
    holds_classes = len(set(below)) > 1 and all(below)

    # Say what to give if they are classes all the same, such as a train/ with kinds of trains beside plane/.
    if all(is_part(name) or _OTHER_PARTS.fullmatch(name.lower()) or is_beside_classes(name) for name in names):
        are, advice = "are", "" if any(below) else ", and the classes with --labels or --label-pattern"
    elif holds_classes:
        pattern = "(?P<label>[^/]+)/"
        are, advice = "are probably", f", or, if these are classes, --data {url} --label-pattern '{pattern}'"
    else:
        return
    raise UsageError(
        f"The folders {first_names(names)} of {url} {are} parts of a data set, and no classes; give --data "
        f"{url}/{part}{advice}."
    )


def check_alphabet(paths: list[tuple[str, ...]], url: str) -> None:
    """Raise UsageError if the top folders are letters by which classes are sorted, as in a/airfield and b/beach.

    The letters would be the classes. Below them, Places365 and SUN397 have classes such as church/indoor, which only a
    pattern finds.
    """
    letters = {path[0] for path in paths if path}
    if len(letters) < 2 or any(len(letter) > 1 or not letter.isalpha() for letter in letters):
        return
    # In A/A_1 and B/B_1, the letters are classes.
    names = {path[:2] for path in paths}
    if all(len(path) == 2 and re.match(rf"{path[0]}[^\W\d_]", path[1], re.IGNORECASE) for path in names):
        letter, name = min(names)
        raise UsageError(
            f"The folders {first_names(sorted(letters))} of {url} sort folders such as {letter}/{name} by their first "
            "letter, and are no classes; give --label-pattern '(?:^|/)[a-zA-Z]/(?P<label>.+)/'."
        )


def check_repeated(paths: list[tuple[str, ...]], url: str, *, without: str = "") -> None:
    """Raise UsageError if the top folders hold parts further down, a copy of the others, or all the same folders; log
    if they hold folders that might be the classes in their place.

    In site1/cat, site1/dog, site2/cat and site2/dog, either the sites or the animals may be the classes. ``without`` is
    the regular expression of a folder that ``paths`` lack behind the topmost ones.
    """
    shared_of, folders_in = _folders_below(paths)
    tops = list(folders_in)
    folders_in.pop("", None)  # of images in no folder

    # Archives hold a data set and a copy of it in a folder.
    for top, names in folders_in.items():
        if len(names) > 1 and top not in names and names <= folders_in.keys():
            raise UsageError(
                f"{url} contains {first_names(sorted(names))} and a folder {top}/ with folders of the same names, "
                f"which would become a class; give --data {url}/{top}, or move it to another place."
            )

    # Data sets that were unpacked beside each other have their parts further down, as in 100x100/fruits/train.
    parts_in = {top: parts_among(names) for top, names in folders_in.items() if shared_of[top]}
    with_parts = [top for top, parts in parts_in.items() if parts]
    if len(tops) > 1 and with_parts:
        parts = sorted({part for top in with_parts for part in parts_in[top]})
        pattern = f"(?P<label>[^/]+)/(?:.+?/)?(?P<split>{'|'.join(map(re.escape, parts))})/"
        if_classes = f", or, if these are classes, --data {url} --label-pattern '{pattern}'"
        raise UsageError(
            f"The folders {first_names(tops)} of {url} are probably data sets of their own, and no classes: the "
            f"folders {first_names(parts)} are further down in {first_names(with_parts)}; give one data set, such as "
            f"--data {url}/{with_parts[0]}{if_classes if with_parts == tops else ''}."
        )

    # If images are directly in the top folders, or these have no name in common, the top folders are the classes.
    counts = Counter(name for names in folders_in.values() for name in names)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if len(tops) < 2 or any(len(path) == 1 for path in paths) or len(counts) < 2 or not repeated:
        report_folders_below(paths, url)
        return
    if all(map(is_beside_classes, counts)):
        raise UsageError(
            f"The class folders {first_names(tops)} of {url} contain {first_names(sorted(counts))}, which would all "
            "become images of the classes; move all of these but the photographs to another place."
        )
    if all(names == counts.keys() for names in folders_in.values()):
        # As in amazon/images/cat and dslr/pictures/cat, there may be other folders between the two.
        between = sorted({"".join(f"{re.escape(folder)}/" for folder in shared) for shared in shared_of.values()})
        shared = between[0] if len(between) == 1 else f"(?:{'|'.join(reversed(between))})"
        raise UsageError(
            f"The folders {first_names(tops)} of {url} all contain {first_names(repeated)}, so that "
            f"either may be the classes; give --data {url} and --label-pattern '(?P<label>[^/]+)/{without}' for the "
            f"former, or '[^/]+/{without}{shared}(?P<label>[^/]+)/' for the latter."
        )
    sentence = "The folders %s of %s are taken for the classes; %s of %s folders below, such as %s, are in several."
    _log.warning(sentence, first_names(tops), url, f"{len(repeated):,}", f"{len(counts):,}", repeated[0])


def report_folders_below(paths: list[tuple[str, ...]], url: str) -> None:
    """Log which folders are taken for the classes if each of them holds several folders, and no image beside these.

    In Aves/2761, Aves/3000, Plantae/1 and Plantae/7477, the numbers may be the classes that somebody wants.
    """
    folders_in = _folders_below(paths)[1]
    num_below = sum(map(len, folders_in.values()))
    if len(folders_in) > 1 and all(len(path) > 1 for path in paths if path) and min(map(len, folders_in.values())) > 1:
        first, names = next(iter(folders_in.items()))
        sentence = "The folders %s of %s are taken for the classes, and not the %s folders in these, such as %s/%s."
        _log.warning(sentence, first_names([*folders_in]), url, f"{num_below:,}", first, min(names))


def _folders_below(paths: list[tuple[str, ...]]) -> tuple[dict[str, tuple[str, ...]], dict[str, set[str]]]:
    """Return, by top folder, the folders in it that all of its images share, and the set of folders below these.

    An archive may unpack as photos/photos/cat, and amazon/images/cat and dslr/images/cat have what is in question in
    one folder each. As in :func:`below_shared_folders`, an image keeps at least one folder.
    """
    # In one pass over all paths, as there may be 10⁵ classes of 10⁷ images.
    rest_of: dict[str, list[tuple[str, ...]]] = {top: [] for top in sorted({path[0] for path in paths if path})}
    for path in filter(None, paths):
        rest_of[path[0]].append(path[1:])
    below_of = {top: below_shared_folders(rest) for top, rest in rest_of.items()}
    shared_of = {top: rest[0][: len(rest[0]) - len(below_of[top][0])] for top, rest in rest_of.items()}
    return shared_of, {top: {path[0] for path in below if path} for top, below in below_of.items()}


def check_linked_classes(files: Listing, classes: Sequence[str]) -> None:
    """Raise UsageError if a folder is in two classes, by a link: each of its images would be trained as both.

    ``classes`` has the class of each image of ``files``.
    """
    if not os.path.isdir(files.url):  # a bucket has no links
        return
    class_of = {image.path.rpartition("/")[0]: name for image, name in zip(files.images, classes, strict=True) if name}
    seen: dict[tuple[int, int], str] = {}  # by device and inode
    for folder, name in class_of.items():
        try:
            status = os.stat(os.path.join(files.url, folder))
        except FileNotFoundError:  # it was removed since it was listed
            continue
        first = seen.setdefault((status.st_dev, status.st_ino), folder)
        if class_of[first] != name:
            raise UsageError(
                f"{first}/ and {folder}/ in {files.url} are one folder, by a link, so that each of its images would be "
                f"in the classes {class_of[first]!r} and {name!r}; remove the link, or put other images in its place."
            )


def report_doubtful(classes: Collection[str], url: str) -> None:
    """Log those of several ``classes`` whose names are seldom those of classes."""
    doubtful = sorted(
        name for name in classes if is_part(name) or is_beside_classes(name) or _HARDLY_CLASSES.fullmatch(name.lower())
    )
    for name in doubtful if len(classes) > 1 else ():
        other_classes = "another" if len(classes) == 2 else f"{len(classes) - 1:,} others"
        _log.warning("%s/ in %s is taken for a class of this name, beside %s.", name, url, other_classes)
