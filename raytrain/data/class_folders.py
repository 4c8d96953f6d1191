"""Classes as folders: an image's class is the name of its folder, and some mistakes are refused."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain.errors import UsageError

_TEST_FOLDERS = ("test", "val", "valid", "validation")


def parent_name(key: str) -> str:
    """The name of the folder that holds the image ``key``; empty if it is in none."""
    return key.rpartition("/")[0].rpartition("/")[2]


def check_classes(found: tuple[str, ...], classes: tuple[str, ...] | None, url: str, num_images: int) -> None:
    """Raise UsageError unless ``found`` are classes to train on, or, if ``classes`` is given, are some of those."""
    if not found:
        raise UsageError(
            f"The {num_images:,} images below {url} are not in class folders; put each class into a folder of "
            f"its name, such as {url.rstrip('/')}/cat/."
        )
    if classes is None and len(found) == 1:
        raise UsageError(
            f"All {num_images:,} images below {url} are of one class, {found[0]!r}; a classifier needs at "
            "least two classes."
        )
    if unknown := sorted(set(found) - set(classes or found)):
        raise UsageError(
            f"{url} has {len(unknown):,} classes that the training images lack: {_first_names(unknown)} (those "
            f"have {_first_names(classes or ())}); rename or remove them."
        )


def refuse_splits(keys: Sequence[str], url: str) -> None:
    """Raise UsageError if there are training and test images, which would become one data set of the same classes."""
    classes: dict[str, set[str]] = {}
    for key in keys:
        top, _, rest = key.partition("/")
        if top in ("train", *_TEST_FOLDERS):
            classes.setdefault(top, set()).add(parent_name(rest))
    for test in _TEST_FOLDERS:
        if (classes.get("train", set()) & classes.get(test, set())) - {""}:
            url = url.rstrip("/")
            raise UsageError(
                f"{url} contains train/ and {test}/, which would become one data set; give --data {url}/train "
                f"--test-data {url}/{test}."
            )


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
