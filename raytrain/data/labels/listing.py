"""Files below a URL: which are images, and why the others are left out."""

from __future__ import annotations

import os
import posixpath
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raytrain.errors import UsageError
from raytrain.storage.folder import dead_ends
from raytrain.storage.store import Store, StoredObject

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif")
_OTHER_FORMATS = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".svg", ".ppm", ".pgm", ".dng", ".dcm")
"""Formats of images that are not read."""
_CONTAINERS = {
    **dict.fromkeys((".zip", ".gz", ".xz", ".bz2", ".zst", ".lz4", ".rar", ".7z"), "unpack it and give the folder"),
    ".tgz": "pack it with `raytrain pack`, or unpack it and give the folder",
    **dict.fromkeys((".tar", ".parquet"), "give its folder to `raytrain pack`, and train on the packed one"),
    ".dvc": "fetch the images with `dvc pull`",
    ".arrow": "write it as Parquet (`Dataset.to_parquet` of datasets), and pack that with `raytrain pack`",
    **dict.fromkeys(
        (".mds", ".tfrecord", ".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl", ".pickle", ".mdb", ".lmdb", ".beton"),
        "write its samples as Parquet or as files in class folders",
    ),
}
_SYSTEM_FOLDERS = frozenset({"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"})
_SYSTEM_FILES = frozenset({"Thumbs.db", "ehthumbs.db", "desktop.ini", "Icon\r", "_SUCCESS"})
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = range(120, 141)  # a pointer of Git LFS is 127 to 134 bytes long
HIDDEN = "hidden files and thumbnails of the system"
TABLES = "tables and descriptions"
_TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt", ".md", ".xml", ".yaml", ".yml", ".html")
_NO_LOSS = (HIDDEN, TABLES)
LINKS = "links that lead nowhere"
EMPTY = "empty folders"
_NO_SUFFIX = "files without a suffix"
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
        return {reason: len(paths) for reason, paths in self.left_out.items() if paths}

    def lost(self) -> list[str]:
        """The paths that are left out, without hidden files and tables."""
        return [path for reason, paths in self.left_out.items() if reason not in _NO_LOSS for path in paths]


def list_files(store: Store) -> Listing:
    """All files below ``store``. Raises StorageError if it cannot be listed, UsageError if it has no image."""
    listing = Listing(store.url)
    found: list[StoredObject] = []
    markers: list[str] = []  # empty objects that stand for folders, as consoles of clouds make them
    for stored in store.list():
        reason = why_left_out(stored.path)
        if reason is None:
            found.append(stored)
        elif reason == _NO_SUFFIX and store.cloud and not stored.size_bytes:
            markers.append(f"{stored.path}/")
        else:
            listing.left_out[reason].append(stored.path)
    for path in dead_ends(store):
        listing.left_out[HIDDEN if is_hidden(path) else EMPTY if path.endswith("/") else LINKS].append(path)
    pointers = _lfs_pointers(store, found)
    listing.left_out[POINTERS] += pointers
    listing.images = sorted(stored for stored in found if stored.path not in pointers)
    listing.left_out[EMPTY] += _without_images(markers, listing.images)
    if not listing.images:
        raise _no_images(listing)
    return listing


def _without_images(folders: Sequence[str], images: Sequence[StoredObject]) -> Iterator[str]:
    """Those of ``folders``, which end in a slash, that none of the sorted ``images`` is below."""
    for folder in folders:
        place = bisect(images, folder, key=lambda image: image.path)
        if place == len(images) or not images[place].path.startswith(folder):
            yield folder


def lost_files(left_out: Mapping[str, int]) -> str:
    """How many files are left out for which reasons, the most first; without hidden files and tables."""
    told = [(reason, count) for reason, count in left_out.items() if reason not in _NO_LOSS and count]
    return "; ".join(f"{count:,} {reason}" for reason, count in sorted(told, key=lambda each: -each[1]))


def is_hidden(path: str) -> bool:
    """Whether ``path`` is a copy or thumbnail that a desktop, a notebook or a disk station keeps beside images."""
    *folders, name = path.split("/")
    return any(part.startswith(".") for part in (*folders, name)) or (
        name in _SYSTEM_FILES or name.endswith("_$folder$") or not _SYSTEM_FOLDERS.isdisjoint(folders)
    )


def check_folder(store: Store) -> None:
    """Raise UsageError if a folder of images is a file, and StorageError if it cannot be listed."""
    if os.path.isfile(store.url):
        refuse_file(store.url)
    store.check_readable()


def refuse_file(url: str) -> None:
    """Raise UsageError if ``url`` is a file, or has a file's suffix. Called if there is no folder of that name."""
    suffix = posixpath.splitext(url.rstrip("/").lower())[1]
    if "*" in url or suffix in (*_CONTAINERS, *SUFFIXES) or os.path.isfile(url):
        kind = "pattern" if "*" in url else f"{suffix} file".lstrip()
        advice = _CONTAINERS.get(suffix, "give the folder")
        raise UsageError(f"{url} is a {kind}, and a folder or a prefix of images is expected; {advice}.")


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
    return f"{suffix} files" if suffix else _NO_SUFFIX


def _lfs_pointers(store: Store, images: Sequence[StoredObject]) -> set[str]:
    """The paths of files that only say which image Git LFS would put in their place."""
    short = [stored.path for stored in images if stored.size_bytes in _POINTER_BYTES]
    contents = zip(short, store.get_many(short), strict=True) if short else ()
    return {path for path, data in contents if isinstance(data, bytes) and data.startswith(_POINTER)}


def _no_images(listing: Listing) -> UsageError:
    if not listing.counts:
        refuse_file(listing.url)
    others = ", ".join(f"{count:,} {reason}" for reason, count in Counter(listing.counts).most_common(4))
    found = f"but {others}" if others else "nor other files"
    kinds = [posixpath.splitext(path)[1] for paths in listing.left_out.values() for path in paths[:1]]
    advice = next((f" {kind} files: {_CONTAINERS[kind]}." for kind in kinds if kind in _CONTAINERS), "")
    return UsageError(
        f"There are no images below {listing.url}, {found}; check the path, and that file names end in "
        f"{', '.join(SUFFIXES)}.{advice}"
    )
