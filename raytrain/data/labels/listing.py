"""Files below a URL: which are images, and how many are left out, by reason, which is always said."""

from __future__ import annotations

import logging
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raytrain.errors import UsageError
from raytrain.storage.folder import broken_links
from raytrain.storage.store import Store, StoredObject

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif")
_OTHER_FORMATS = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".svg", ".ppm", ".pgm", ".dng", ".dcm")
"""Formats of images that are not read."""
_CONTAINERS = {
    ".zip": "unpack it and give the folder",
    ".tgz": "pack it with `raytrain pack`, or unpack it and give the folder",
    ".gz": "unpack it and give the folder",
    ".rar": "unpack it and give the folder",
    ".7z": "unpack it and give the folder",
    ".tar": "pack it with `raytrain pack`, and give the packed folder",
    ".parquet": "pack it with `raytrain pack`, and give the packed folder",
    ".arrow": "write it as Parquet (`Dataset.to_parquet` of datasets), and pack that with `raytrain pack`",
    ".mds": "write its samples as Parquet or as files in class folders",
    ".tfrecord": "write its samples as Parquet or as files in class folders",
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
POINTERS = "pointers of Git LFS (`git lfs pull` fetches the images)"


@dataclass
class Listing:
    """The image files below ``url``, sorted by path, and the paths of all other files by why they are left out."""

    url: str
    images: list[StoredObject] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many files are left out, by reason."""
        return {reason: len(paths) for reason, paths in self.left_out.items()}

    @property
    def paths_left_out(self) -> list[str]:
        """The paths of all files that are left out, without those that are no loss."""
        return [path for reason, paths in self.left_out.items() if reason not in _NO_LOSS for path in paths]

    def leave_out(self, path: str, reason: str) -> None:
        """Count ``path`` among the files that are left out for this reason."""
        self.left_out.setdefault(reason, []).append(path)


def list_files(store: Store) -> Listing:
    """All files below ``store``. Raises StorageError if it cannot be listed, UsageError if it has no image."""
    listing = Listing(store.url)
    found: list[StoredObject] = []
    for stored in store.list():
        reason = _reason(stored.path)
        if reason is None:
            found.append(stored)
        else:
            listing.leave_out(stored.path, reason)
    for path in broken_links(store):
        listing.leave_out(path, HIDDEN if is_hidden(path) else LINKS)
    pointers = _lfs_pointers(store, found)
    for path in pointers:
        listing.leave_out(path, POINTERS)
    listing.images = sorted(stored for stored in found if stored.path not in pointers)
    if not listing.images:
        raise _no_images(listing)
    return listing


def tell_left_out(listing: Listing, lost_classes: Sequence[str] = ()) -> None:
    """Log how many files are left out and why, and which classes have no image left; not hidden files or tables."""
    reasons = lost_files(listing.counts)
    if not reasons:
        return
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
    """Raise UsageError if ``url`` names a file by its suffix. Called if there is no folder of that name."""
    suffix = posixpath.splitext(url.rstrip("/").lower())[1]
    if "*" in url:
        raise UsageError(f"{url} is a pattern, and a folder or a prefix of images is expected; give the folder.")
    if advice := _CONTAINERS.get(suffix):
        raise UsageError(f"{url} is a {suffix} file, and a folder or a prefix of images is expected; {advice}.")
    if suffix in SUFFIXES:
        raise UsageError(f"{url} is one image, and a folder or a prefix of images is expected; give the folder.")


def _reason(path: str) -> str | None:
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
