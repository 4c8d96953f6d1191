"""Files of this machine that a job on a cluster needs: the user's code, no images, no secrets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from raytrain.config import TrainConfig
from raytrain.config.user_function import names_own_function
from raytrain.data.labels.listing import SUFFIXES
from raytrain.errors import UsageError, flag

_MAX_BYTES = 100 * 1024**2  # Ray's limit
_FOLDERS_LEFT_OUT = {".git", ".venv", "venv", "node_modules", "__pycache__", ".aws", ".ssh", ".ray"}
_LEFT_OUT = GitIgnoreSpec.from_lines(
    ["/runs/", ".env*", ".netrc", "credentials*", "id_rsa*", "id_ed25519*", "*.pem", "*.key"]
)
Rules = tuple[tuple[Path, GitIgnoreSpec], ...]
"""The .gitignore files that count, each with its folder, the outermost first."""


@dataclass(frozen=True)
class JobFiles:
    """Files below ``folder``, by their paths relative to it."""

    folder: Path
    paths: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """Their sizes together."""
        return sum((self.folder / path).stat().st_size for path in self.paths)

    def copy_to(self, folder: Path) -> None:
        """Copy them, under the same paths."""
        for path in self.paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path, folder / path)


def job_files(config: TrainConfig) -> JobFiles:
    """Everything in the folders of the user's functions, but images, what a .gitignore names, and likely secrets."""
    current = Path.cwd().resolve()
    functions = {option: getattr(config, option) for option in ("loop", "model")}
    folders = {_folder(option, name) for option, name in functions.items() if names_own_function(name)}
    found = {path for folder in folders if folder is not None for path in _files(current, folder)}
    files = JobFiles(current, tuple(sorted(found)))
    if files.num_bytes > _MAX_BYTES:
        largest = max(files.paths, key=lambda path: (current / path).stat().st_size)
        raise UsageError(
            f"The job needs files of {files.num_bytes / 1024**2:.0f} MiB, and Ray takes 100 MiB. "
            f"The largest is {largest}; name what the loop does not need in a .gitignore."
        )
    return files


def check_places(config: TrainConfig) -> None:
    """Raise UsageError if the options name a place that only this machine has."""
    for option in ("data", "test_data", "labels", "weights", "storage"):
        place: str | None = getattr(config, option)
        if place in (None, "", "DEFAULT") or "://" in place or Path(place).is_absolute():
            continue
        raise UsageError(
            f"{flag(option)} is {place}, which would be a folder of the job, gone after it; give s3://bucket/prefix, "
            "or the whole path of a folder that all machines of the cluster share."
        )


def _folder(option: str, name: str) -> Path | None:
    """The folder with a function of the user's own, relative to the current one; None if a package has the function."""
    place = name.rpartition(":")[0]
    if not place.endswith(".py"):
        top = place.partition(".")[0]
        return Path(top) if Path(top).is_dir() else Path() if Path(f"{top}.py").is_file() else None
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise UsageError(f"{flag(option)} is {name}; submit from its folder, or from one above it.")
    if not Path(place).is_file():
        raise UsageError(f"{flag(option)}: there is no file {place}; its path is relative to the current folder.")
    return Path(place).parent


def _files(root: Path, folder: Path) -> Iterator[Path]:
    """The files in ``folder``, deep, relative to ``root``, where ``folder`` is, too."""
    for file in _walk(root / folder, _rules_above(root / folder, root)):
        path = file.relative_to(root)
        if not _LEFT_OUT.match_file(path.as_posix()) and not path.name.lower().endswith(SUFFIXES):
            yield path


def _walk(folder: Path, inherited: Rules) -> Iterator[Path]:
    """The files in ``folder``, deep, that no .gitignore leaves out; one counts for its folder and those below."""
    rules = (*inherited, *_rules_in(folder))
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in _FOLDERS_LEFT_OUT or _is_ignored(path, is_folder, rules):
            continue
        if is_folder:
            yield from _walk(path, rules)
        elif entry.is_file():
            yield path


def _rules_above(folder: Path, root: Path) -> Rules:
    """The .gitignore files above ``folder``, from the top of its repository on; if it is in none, from ``root`` on."""
    top = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), root)
    places = [each for each in reversed(folder.parents) if each.is_relative_to(top)]
    return tuple(rule for place in places for rule in _rules_in(place))


def _rules_in(folder: Path) -> Rules:
    file = folder / ".gitignore"
    return (
        ((folder, GitIgnoreSpec.from_lines(file.read_text(errors="replace").splitlines())),) if file.is_file() else ()
    )


def _is_ignored(path: Path, is_folder: bool, rules: Rules) -> bool:
    """Whether the last .gitignore that says anything about ``path`` leaves it out."""
    end = "/" if is_folder else ""
    said = (spec.check_file(f"{path.relative_to(place).as_posix()}{end}").include for place, spec in reversed(rules))
    return next((include for include in said if include is not None), False)
