"""Files below a URL: which are images, and why the others are left out."""

from __future__ import annotations

import logging
import os
import posixpath
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from raytrain.errors import UsageError
from raytrain.storage.folder import dead_ends
from raytrain.storage.store import Store, StoredObject

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif")
_OTHER_FORMATS = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".svg", ".ppm", ".pgm", ".dng", ".dcm")
"""Formats of images that are not read."""
_ARRAYS = (
    *(".mds", ".tfrecord", ".array_record", ".rec", ".idx", "-ubyte", ".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl"),
    *(".pickle", ".mdb", ".lmdb", ".beton"),
)
_WRITE_SAMPLES = "write the samples as Parquet or as files in class folders"
_CONTAINERS = {
    **dict.fromkeys((".zip", ".gz", ".xz", ".bz2", ".zst", ".lz4", ".rar", ".7z"), "unpack it and give the folder"),
    ".tgz": "pack it with `raytrain pack`, or unpack it and give the folder",
    **dict.fromkeys((".tar", ".parquet"), "give its folder to `raytrain pack`, and train on the packed one"),
    ".dvc": "fetch the images with `dvc pull`",
    ".arrow": "write it as Parquet (`Dataset.to_parquet` of datasets), and pack that with `raytrain pack`",
    **dict.fromkeys(_ARRAYS, _WRITE_SAMPLES),
    **dict.fromkeys((".mp4", ".avi", ".mov", ".mkv", ".webm"), "write pictures of the videos into class folders"),
    **dict.fromkeys((".nii", ".mha", ".nrrd"), "write the slices of the volumes as PNG files into class folders"),
}
_SYSTEM_FOLDERS = frozenset(
    (
        *("__MACOSX", "@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot", "$RECYCLE.BIN"),
        *("System Volume Information", "lost+found", "site-packages", "node_modules"),
    )
)
_SYSTEM_FILES = frozenset({"Thumbs.db", "ehthumbs.db", "desktop.ini", "Icon\r", "_SUCCESS"})
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = range(120, 141)  # a pointer of Git LFS is 127 to 134 bytes long
_SYSTEM_DOTS = re.compile(
    r"\.(git|svn|hg|dvc|cache|ipynb_checkpoints|.*thumb.*|trash.*|apple.*|spotlight.*|fsevents.*|temp.*|tmp.*|document.*|"
    r"picasa.*|xvpics|snapshots?|zfs|idea|vscode|venv|config|local|huggingface|kaggle)",
    re.IGNORECASE,
)
_ICLOUD = ".icloud"
HIDDEN = "hidden files and thumbnails of the system"
DOTTED = "images in folders whose names begin with a dot"
TABLES = "tables and descriptions"
_TABLES = (
    *(".csv", ".tsv", ".jsonl", ".ndjson", ".manifest", ".json", ".parquet", ".txt", ".lst"),
    *(".md", ".xml", ".yaml", ".yml", ".html"),
)
_NO_LOSS = (HIDDEN, TABLES)  # reasons that no user would miss a file for
LINKS = "links that lead nowhere"
EMPTY = "empty folders"
_DEAD_ENDS = {"link": LINKS, "empty folder": EMPTY, "pipe or device": "pipes, sockets and devices"}
_NO_SUFFIX = "files without a suffix"
_NUMBER_OF_PART = re.compile(r"-\d+-of-\d+$")  # as TensorFlow Datasets names files
_SUFFIX = re.compile(r"\.(?=.*[a-z])[a-z0-9_~-]{1,12}")  # as of a format; other dots are in names, such as 1.2.840.113
_MOST_REASONS = 8  # that are named in one line
NOT_DOWNLOADED = "images that iCloud has not downloaded"
POINTERS = "pointers of Git LFS (`git lfs pull` fetches the images)"

_log = logging.getLogger("raytrain")


@dataclass
class Listing:
    """The image files below ``url``, sorted by path, and the paths of the other files by why they are left out."""

    url: str
    images: list[StoredObject] = field(default_factory=list)
    left_out: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def counts(self) -> dict[str, int]:
        """Number of files that are left out, by reason."""
        return {reason: len(paths) for reason, paths in self.left_out.items() if paths}


def check_folder(store: Store) -> None:
    """Raise UsageError if a folder of images is a file, and StorageError if it cannot be listed."""
    if os.path.isfile(store.url):
        refuse_file(store.url)
    store.check_readable()


def list_files(store: Store) -> Listing:
    """List all files below ``store``; those whose size is that of a pointer of Git LFS are read.

    Raises StorageError if it cannot be listed, and UsageError if it has no image.
    """
    listing = Listing(store.url)
    candidates: list[StoredObject] = []
    markers: list[str] = []  # empty objects that stand for folders, as consoles of clouds make them
    for stored in store.list():
        reason = why_left_out(stored.path)
        if reason is None:
            candidates.append(stored)
        elif reason == _NO_SUFFIX and store.cloud and not stored.size_bytes:
            markers.append(f"{stored.path}/")
        else:
            listing.left_out[reason].append(stored.path)

    # A folder of this machine may also have what is no file and leads to none. The path of a folder ends in a slash.
    for path, kind in dead_ends(store):
        shown = f"{path}/" if kind == "empty folder" else path
        listing.left_out[HIDDEN if is_hidden(path) else _DEAD_ENDS[kind]].append(shown)

    # Git LFS puts a small text in place of an image until somebody fetches that: files of its size are read.
    small_files = [stored.path for stored in candidates if stored.size_bytes in _POINTER_BYTES]
    contents = zip(small_files, store.get_many(small_files), strict=True) if small_files else ()
    pointers = {path for path, data in contents if isinstance(data, bytes) and data.startswith(LFS_POINTER)}
    listing.left_out[POINTERS] += pointers
    listing.images = sorted(stored for stored in candidates if stored.path not in pointers)

    # A marker of a folder counts as an empty folder if no image is below it: paths are sorted, so such an image would
    # be the first one that follows the marker.
    for folder in markers:
        following = bisect(listing.images, folder, key=lambda image: image.path)
        if following == len(listing.images) or not listing.images[following].path.startswith(folder):
            listing.left_out[EMPTY].append(folder)
    if not listing.images:
        raise _no_images(listing)
    return listing


def why_left_out(path: str) -> str | None:
    """Return why a file is not used; None if it is taken for an image.

    >>> why_left_out("cat/notes.csv")
    'tables and descriptions'
    """
    suffix = _suffix_of(path)
    if is_hidden(path):
        # A class may be called .net, so the user hears of its images. The hidden folders of programs have known names.
        *folders, name = path.split("/")
        dotted = [folder for folder in folders if folder.startswith(".")]
        is_of_program = any(map(_SYSTEM_DOTS.fullmatch, dotted)) or not _SYSTEM_FOLDERS.isdisjoint(folders)
        may_be_of_class = bool(dotted) and not is_of_program and not is_hidden(name)
        # A Mac that has an image in iCloud only keeps a small file .1.jpg.icloud in its place.
        is_placeholder = suffix == _ICLOUD and not is_of_program
        if is_placeholder and posixpath.splitext(name.lower().removesuffix(_ICLOUD))[1] in SUFFIXES:
            return NOT_DOWNLOADED
        return DOTTED if may_be_of_class and suffix in SUFFIXES else HIDDEN
    if suffix in SUFFIXES:
        return None
    if suffix in _TABLES:
        return TABLES
    if suffix == "-ubyte":
        return "-ubyte files"
    if suffix in _OTHER_FORMATS:
        return f"{suffix} files (not read; convert them to PNG or JPEG)"
    return f"{suffix} files" if _SUFFIX.fullmatch(suffix) else _NO_SUFFIX


def ends_like_image(path: str) -> bool:
    """Return True if a path ends like an image, also of a format that is not read.

    >>> ends_like_image("a.JPG"), ends_like_image("a.tif"), ends_like_image("1.5")
    (True, True, False)
    """
    return path.lower().endswith(SUFFIXES + _OTHER_FORMATS)


def _suffix_of(path: str) -> str:
    """Return what ends a file's name and says its format, in lower case, without the number of a part.

    >>> _suffix_of("flowers-train.tfrecord-00000-of-00002"), _suffix_of("brain.nii.gz"), _suffix_of("x.JPG")
    ('.tfrecord', '.nii', '.jpg')
    """
    name = _NUMBER_OF_PART.sub("", path.lower())
    if name.endswith("-ubyte"):  # of MNIST, also with a dot: train-images-idx3-ubyte
        return "-ubyte"
    return posixpath.splitext(name.removesuffix(".gz") if name.endswith(".nii.gz") else name)[1]


def is_hidden(path: str) -> bool:
    """Return True if ``path`` is hidden or in a hidden folder, or a system or a program keeps it beside images."""
    *folders, name = path.split("/")
    return any(part.startswith(".") for part in (*folders, name)) or (
        name in _SYSTEM_FILES or name.endswith("_$folder$") or not _SYSTEM_FOLDERS.isdisjoint(folders)
    )


def _no_images(listing: Listing) -> UsageError:
    """Return the error for a folder without images, which says what files it has instead, and what to do.

    Raise it if there is nothing at all and the URL looks like a file.
    """
    if not listing.counts:
        refuse_file(listing.url)
    reasons = ", ".join(counted(count, reason) for reason, count in Counter(listing.counts).most_common(4))
    instead = f"but {reasons}" if reasons else "nor other files"

    # Say what to do with the first file that holds images. `pack` does not look for archives in folders below its own.
    paths = (path for paths in listing.left_out.values() for path in paths)
    container = next((path for path in paths if _suffix_of(path) in _CONTAINERS), "")
    folder, suffix = posixpath.dirname(container), _suffix_of(container)
    advice = f" {suffix} files: {_CONTAINERS[suffix]}." if container else ""
    if not container and any(reason in (TABLES, _NO_SUFFIX) or reason.endswith(" files") for reason in listing.counts):
        advice = (
            f" If these files hold images, {_WRITE_SAMPLES}."  # as pickles without a suffix and columns of pixels do
        )
    if folder:
        advice = advice.replace("its folder", f"their folder, such as {listing.url.rstrip('/')}/{folder},")
    return UsageError(
        f"There are no images below {listing.url}, {instead}; check the path, and that file names end in "
        f"{', '.join(SUFFIXES)}.{advice}"
    )


def refuse_file(url: str) -> None:
    """Raise UsageError if ``url`` is a pattern such as ``*.jpg`` or a file, or its name ends as a file's does.

    Called once no images were found below ``url``, because a folder may have such a name, too.
    """
    suffix = _suffix_of(url.rstrip("/"))
    if "*" in url or suffix in (*_CONTAINERS, *SUFFIXES) or os.path.isfile(url):
        kind = "pattern" if "*" in url else f"{suffix} file".lstrip()
        advice = _CONTAINERS.get(suffix, "give the folder")
        raise UsageError(f"{url} is a {kind}, and a folder or a prefix of images is expected; {advice}.")


def report_left_out(listing: Listing, *, in_class_folders: bool = False) -> None:
    """Log how many files are left out and why, but not hidden files and tables.

    With ``in_class_folders``, also name the folders all of whose images were left out, beside those that have images.
    """
    reasons = lost_files(listing.counts)
    if not reasons:
        return
    without_images = list[str]()
    if in_class_folders:
        # The folders that files were lost from. A link without a suffix stands for a whole folder.
        lost = [path for reason, paths in listing.left_out.items() if reason not in _NO_LOSS for path in paths]
        linked_folders = {path for path in listing.left_out[LINKS] if not posixpath.splitext(path)[1]}
        folders_of_lost = {path.rpartition("/")[0] for path in lost} | linked_folders

        # Those of them that have no image, but are in the same folder as one that has: they are probably classes, too.
        folders_with_images = {stored.path.rpartition("/")[0] for stored in listing.images}
        parents = {folder.rpartition("/")[0] for folder in folders_with_images}
        without_images = sorted(
            folder
            for folder in folders_of_lost - folders_with_images
            if folder and folder.rpartition("/")[0] in parents
        )
    names = first_names(list(map(repr, without_images)))
    _log.warning("Left out below %s: %s.%s", listing.url, reasons, f" No image is left in {names}." if names else "")


def lost_files(left_out: Mapping[str, int]) -> str:
    """Return the reasons why files are left out with their counts, the largest first, but not hidden files and tables.

    >>> lost_files({"links that lead nowhere": 2, "tables and descriptions": 1})
    '2 links that lead nowhere'
    """
    counts = [(reason, count) for reason, count in left_out.items() if reason not in _NO_LOSS and count]
    counts.sort(key=lambda pair: -pair[1])
    named = counts if len(counts) <= _MOST_REASONS else counts[: _MOST_REASONS - 1]
    texts = [counted(count, reason) for reason, count in named]
    if rest := counts[len(named) :]:  # such as the random suffixes of downloads that were broken off
        texts.append(f"{sum(count for _, count in rest):,} files of {len(rest):,} other kinds")
    return "; ".join(texts)


def counted(count: int, reason: str) -> str:
    """Return a count of files and the reason why they are left out, in the singular for one file.

    >>> counted(1, TABLES), counted(2, TABLES)
    ('1 table or description', '2 tables and descriptions')
    """
    if count == 1:
        things = "file|folder|image|link|pointer|row|table|description|thumbnail|pipe|socket|device"
        reason = re.sub(rf"\b({things})s\b", r"\1", reason)
        reason = reason.replace(" lead ", " leads ").replace(" and ", " or ").replace(" them ", " it ")
    return f"{count:,} {reason}"


def first_names(names: list[str] | tuple[str, ...]) -> str:
    """Return the first five of ``names``, for a message: ``a, b, c, d, e, …``."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
