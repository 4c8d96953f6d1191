"""Labelled images in a tar, of WebDataset or of class folders.

In a tar of WebDataset, the files of a *sample* follow each other and share the name up to the first dot: ``17.jpg``
with ``17.cls`` or ``17.json``, and perhaps ``17.seg.png``, a mask, which is not the image. A label is the text of .cls,
or "label" or "cls" in .json. Any other tar has a folder for each class.
"""

from __future__ import annotations

import json
import posixpath
import tarfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import IO, Any

from raytrain.data.labels.folders import read_folders
from raytrain.data.labels.listing import SUFFIXES, is_hidden, why_left_out
from raytrain.datasets.archive import Archive, ArchivedImage, ArchivedImages
from raytrain.errors import UsageError, format_count

_LABEL_SUFFIXES = (".cls", ".json")
_LABEL_FILE_SUFFIXES = frozenset({".csv", ".tsv", ".jsonl"})
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")
_SECOND_IMAGES = "second images of a sample, such as masks (--image-suffix takes them instead)"
_CHUNK_BYTES = 1 << 20


@dataclass
class TarArchive(Archive):
    """A tar that is being read. Of several images with one label, the JPEG is taken, or the one of ``image_suffix``."""

    image_suffix: str | None = None  # says which of several images of a sample to take, such as ``png`` or ``seg.png``

    def _images(self, file: IO[bytes]) -> ArchivedImages:
        """Yield the images of a tar, labelled by a file beside each, or else by their folders.

        Raises TarError if the tar is damaged, and UsageError if the images have no labels or doubtful ones.
        """
        with tarfile.open(fileobj=file, mode="r:*") as tar:
            # Go through all headers first: a tar has no list of its files.
            members: list[tarfile.TarInfo] = []
            suffixes: Counter[str] = Counter()  # of all files, in the tar's order
            for member in tar:
                if member.isdir():
                    continue
                name = PurePosixPath(member.name).name
                suffixes[_suffix(name)] += 1
                if not (member.isfile() or member.islnk()):  # a hard link is read like the file that it stands for
                    reason = "links"
                elif _suffix(name) in _LABEL_SUFFIXES and not is_hidden(name):
                    reason = None
                else:
                    reason = why_left_out(name)
                if reason is None:
                    members.append(member)
                else:
                    self.left_out[reason] += 1
            _check_end(tar)

            # An image and its label file have the same name up to the first dot.
            images = [member for member in members if _suffix(member.name) in SUFFIXES]
            keys_of_images = {_sample_key(member.name) for member in images}
            keys_of_labels = {_sample_key(member.name) for member in members if _suffix(member.name) in _LABEL_SUFFIXES}
            if keys_of_images & keys_of_labels:
                yield from self._with_label_files(tar, members, len(images))
            elif images:
                # A label file beside images in folders would be read; one in a tar is not, so say so.
                if tables := sorted(_LABEL_FILE_SUFFIXES & suffixes.keys()):
                    self.choices.add(
                        f"the folders are the classes, and {' and '.join(tables)} files in a tar are not read; if one "
                        "says the classes, unpack the images, and give it with --labels"
                    )
                yield from self._in_class_folders(tar, images, suffixes)

    def _with_label_files(
        self, tar: tarfile.TarFile, members: list[tarfile.TarInfo], num_images: int
    ) -> ArchivedImages:
        """Yield the images of a tar of WebDataset that have a label file beside them, and count the others.

        Raises UsageError if a label may belong to any of several images, or none of ``num_images`` images has one.
        """
        num_alone = 0  # images without a label
        for _, group in groupby(members, lambda member: _sample_key(member.name)):
            images: dict[str, list[tarfile.TarInfo]] = {}  # by the names without suffix
            labels: dict[str, str] = {}
            for member in group:
                stem = member.name.removesuffix(PurePosixPath(member.name).suffix)
                if _suffix(member.name) in SUFFIXES:
                    images.setdefault(stem, []).append(member)
                elif _suffix(member.name) in _LABEL_SUFFIXES and (label := _tar_label(tar, member)):
                    labels.setdefault(stem, label)

            # If a sample has one label, such as 17.cls beside 17.input.jpg and 17.seg.png, it is for the image that
            # image_suffix names or that is the only JPEG: then all images of the sample are candidates for it.
            # Otherwise, label and image must have the same name.
            if len(labels) == 1 and (self.image_suffix or not images.keys() & labels.keys()):
                all_images = [member for members_of_stem in images.values() for member in members_of_stem]
                if self.image_suffix or self._labelled_image(all_images) is not None:
                    images = dict.fromkeys(labels, all_images) if all_images else {}

            # Take one image for each label. Those that are left have none.
            for stem in [stem for stem in images if stem in labels]:
                candidates = images.pop(stem)
                member = self._labelled_image(candidates)
                if member is None:
                    names = [PurePosixPath(candidate.name).name for candidate in candidates]
                    raise UsageError(
                        f"{self.name} has one label beside {' and '.join(names[:3])}; name the image to take with "
                        f"--image-suffix, such as --image-suffix {names[0].partition('.')[2]}."
                    )
                self.left_out[_SECOND_IMAGES] += len(candidates) - 1
                yield ArchivedImage(member.name, _content(tar, member), labels.pop(stem))
            num_alone += sum(map(len, images.values()))
        if num_images and num_alone == num_images:
            raise UsageError(
                f"None of the {format_count(num_images, 'image')} of {self.name} is beside its label: the files of one "
                "image must follow each other in a tar and be called alike, as 17.jpg and 17.cls (or 17.json with "
                "label or cls); if a sample has several images, name the one to take with --image-suffix."
            )
        self.left_out["images without a label beside them"] += num_alone

    def _labelled_image(self, candidates: Sequence[tarfile.TarInfo]) -> tarfile.TarInfo | None:
        """Return the one of several images that their label is meant for; None if that is unclear.

        It is the one that ``image_suffix`` names. Without a suffix, it is the only image, or else the only JPEG: masks
        and depth maps are never JPEGs, which would change their values.
        """
        if self.image_suffix is None:
            suffixes = SUFFIXES if len(candidates) == 1 else _JPEG_SUFFIXES
            chosen = [member for member in candidates if _suffix(member.name) in suffixes]
        else:
            suffix = "." + self.image_suffix.lower().lstrip(".")
            chosen = [member for member in candidates if member.name.lower().endswith(suffix)]
            # --image-suffix png means 17.png even if the sample also has a 17.seg.png.
            exact = [member for member in chosen if member.name.lower() == _sample_key(member.name.lower()) + suffix]
            chosen = exact or chosen
        return chosen[0] if len(chosen) == 1 else None

    def _in_class_folders(
        self, tar: tarfile.TarFile, images: list[tarfile.TarInfo], suffixes: Counter[str]
    ) -> ArchivedImages:
        """Yield the images of a tar without label files: their folders are the labels.

        Raises UsageError if these are training and held-out images, or in no class folders. ``suffixes`` counts all
        files of the tar, for the message.
        """
        # Leave out hidden files. A folder that all images share may be hidden, so only what is below it is looked at.
        paths = [str(PurePosixPath(member.name)).lstrip("/") for member in images]
        shared_folder = posixpath.commonpath([posixpath.dirname(path) for path in paths])
        reasons = [why_left_out(path.removeprefix(shared_folder).lstrip("/")) for path in paths]
        self.left_out.update(filter(None, reasons))
        kept = [index for index, reason in enumerate(reasons) if reason is None]

        # The folders must be classes, and not parts.
        try:
            folders = read_folders([paths[index] for index in kept], self.name)
        except UsageError as error:  # which names options and folders that an archive does not have
            raise UsageError(f"{error} Unpack the archive for that.") from None
        if folders.parts is not None:
            first, second, *_ = folders.folder_of.values()
            raise UsageError(
                f"{self.name} contains {first}/ and {second}/, which would become one data set; unpack "
                "it, and pack each folder."
            )
        if not any(folders.classes):
            files = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.items())
            raise UsageError(
                f"{self.name} has neither labels beside its images (.cls, or .json with label or cls) nor class "
                f"folders, but {files}."
            )
        self.has_class_folders = True
        for index, label in zip(kept, folders.classes, strict=True):
            if not label:
                self.left_out["images outside of class folders"] += 1
                continue
            yield ArchivedImage(paths[index], _content(tar, images[index]), label)


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise TarError unless zeros, the mark of its end, and nothing else follow the members of ``tar``.

    tarfile stops silently at a damaged header, at zeros, and at the end of the file. So it would leave out what follows
    a hole of zeros, or a second tar in the file. Reading to the end also verifies gzip's checksum.
    """
    raw: Any = tar.fileobj
    raw.seek(tar.offset)
    position = tar.offset
    while chunk := raw.read(_CHUNK_BYTES):
        if position == tar.offset and chunk[: tarfile.BLOCKSIZE].strip(b"\0"):
            raise tarfile.TarError(f"it is damaged at byte {position:,}")
        if rest := chunk.lstrip(b"\0"):
            raise tarfile.TarError(
                f"zeros from byte {tar.offset:,} on, as at the end of a tar, are followed by data at byte "
                f"{position + len(chunk) - len(rest):,}: it has a hole, or is several tars in one file, which "
                "`tar --ignore-zeros` unpacks"
            )
        position += len(chunk)
    if position == tar.offset:
        raise tarfile.TarError(f"it is cut off: the mark of its end is missing at byte {position:,}")


def _suffix(name: str) -> str:
    """Return the last suffix of a file's name in lower case: ``.png`` for ``17.seg.PNG``."""
    return PurePosixPath(name).suffix.lower()


def _sample_key(name: str) -> str:
    """Return the key of a sample, which its files share: the path up to the first dot in the file's name."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the content of a file, or of the one that a hard link names; raise TarError if there is none."""
    try:
        opened = tar.extractfile(member)
    except KeyError as error:  # the tar lacks the file that a link names
        raise tarfile.TarError(str(error)) from None
    assert opened is not None
    return opened.read()


def _tar_label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """Return the label in a .cls or .json file; empty if it has none. Raise UsageError for several, or invalid text."""
    # A .cls file is nothing but the label. Bytes that are no UTF-8 must not be replaced by a sign for "unknown": the
    # classes é and è of another encoding would become the same class.
    content = _content(tar, member)
    if _suffix(member.name) == ".cls":
        try:
            label = content.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            label = "\0"
        if "\0" in label:  # as in a number of several bytes
            raise UsageError(
                f"The label in {member.name!r} is {content[:80]!r}, which is not text in UTF-8; write it in UTF-8."
            )
        return label

    # A .json file may have a label; a damaged one counts as one without.
    document: Any = None
    with suppress(ValueError, RecursionError):
        document = json.loads(content)
    label = document.get("label", document.get("cls", "")) if isinstance(document, dict) else ""
    if isinstance(label, (list, dict)):
        raise UsageError(
            f"A label in a .json file is {json.dumps(label)[:80]}, and one class per image is expected; unpack the "
            "images, and give their classes with --labels and --label-separator."
        )

    # The values of JSON become the texts that label files have: null is empty, true is "true", and 3.0 is "3".
    if label is None:
        return ""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label)
