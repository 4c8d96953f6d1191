"""Files of this machine that a job on a cluster needs: what the user's code imports, and what --include names."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from raytrain.config import TrainConfig
from raytrain.config.user_code import names_own_function
from raytrain.errors import UsageError, flag

_MAX_BYTES = 100 * 1024**2  # Ray's limit
_SECRET_NAMES = (
    *(".*", "*credential*", "*secret*", "*password*", "*service*account*", "*token*.json", "id_rsa*", "id_dsa*"),
    *("id_ecdsa*", "id_ed25519*", "*kubeconfig*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx"),
    *("*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.gpg", "*history"),
)
_SECRETS = GitIgnoreSpec.from_lines(_SECRET_NAMES)
_PRIVATE_KEY, _MAX_KEY_BYTES = b"PRIVATE KEY-----", 1024**2
_FOLDERS_LEFT_OUT = {"venv", "node_modules", "__pycache__"}
Rules = tuple[tuple[Path, GitIgnoreSpec], ...]
"""The .gitignore files that count, each with its folder, the outermost first."""


@dataclass(frozen=True)
class JobFiles:
    """Files below ``folder``, by their paths relative to it; ``left_out`` says what was not taken, each with why."""

    folder: Path
    paths: tuple[Path, ...]
    left_out: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {path.as_posix(): (self.folder / path).stat().st_size for path in self.paths}

    def copy_to(self, folder: Path) -> None:
        """Copy them, under the same paths."""
        for path in self.paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path, folder / path, follow_symlinks=False)


def job_files(config: TrainConfig, include: Sequence[str] = ()) -> JobFiles:
    """What the user's functions import from below the current folder, and the files and folders in ``include``.

    Raises UsageError if one of them is a link, outside of the current folder, or likely a secret, and if they are more
    than Ray takes. In a folder, such files are left out, and so is what a .gitignore names.
    """
    current = Path.cwd().resolve()
    left_out: list[str] = []
    found = {path for option, name in _functions(config) for path in _code(current, option, name)}
    found |= {path for name in include for path in _included(current, name, left_out)}
    files = JobFiles(current, tuple(sorted(found)), tuple(sorted(left_out)))
    if (total := sum(files.sizes.values())) > _MAX_BYTES:
        largest = max(files.sizes, key=files.sizes.__getitem__)
        raise UsageError(
            f"The job needs files of {total / 1024**2:.0f} MiB, and Ray takes 100 MiB. The largest is {largest}; "
            "include less, or put it into the bucket."
        )
    return files


def check_places(config: TrainConfig) -> None:
    """Raise UsageError if the options name a place that only this machine has."""
    for option in ("data", "test_data", "labels", "test_labels", "weights", "storage"):
        place: str | None = getattr(config, option)
        if place in (None, "", "DEFAULT") or "://" in place or Path(place).is_absolute():
            continue
        raise UsageError(
            f"{flag(option)} is {place}, which would be a folder of the job, gone after it; give s3://bucket/prefix, "
            "or the whole path of a folder that all machines of the cluster share."
        )


def _functions(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Option and value of each of the user's own functions."""
    for option in ("loop", "model", "transforms", "track"):
        given = getattr(config, option)
        for name in given if isinstance(given, tuple) else (given,):
            if names_own_function(name):
                yield option, name


def _code(root: Path, option: str, name: str) -> set[Path]:
    """The file of a function and the files that it imports, deep, relative to ``root``. Imports nothing itself."""
    place = name.rpartition(":")[0]
    is_file = place.endswith(".py")
    if is_file:
        _check_file(option, name, place)
    places = (root, root / Path(place).parent) if is_file else (root,)
    waiting = [Path(place)] if is_file else [*_modules(place, places, root)]
    found: set[Path] = set()
    while waiting:
        if (path := waiting.pop()) not in found:
            found.add(path)
            _check_own(flag(option), root, path)
            waiting += _imports(root, path, option, places)
    return found


def _check_file(option: str, name: str, place: str) -> None:
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise UsageError(f"{flag(option)} is {name}; submit from its folder, or from one above it.")
    if not Path(place).is_file():
        raise UsageError(f"{flag(option)}: there is no file {place}; its path is relative to the current folder.")


def _imports(root: Path, path: Path, option: str, places: Iterable[Path]) -> Iterator[Path]:
    """The files that the module at ``path`` imports anywhere in its code, with the packages around them."""
    try:
        nodes = list(ast.walk(ast.parse((root / path).read_bytes())))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{flag(option)}: {path} cannot be read as Python ({error}).") from None
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _modules(each.name, places, root)
        elif isinstance(node, ast.ImportFrom):
            start = (root / path).parents[node.level - 1 : node.level] if node.level else places
            for each in node.names:
                yield from _modules(f"{node.module or ''}.{each.name}".lstrip("."), start, root)


def _modules(name: str, places: Iterable[Path], root: Path) -> Iterator[Path]:
    """The files in ``places`` of the module or the attribute ``name``, and of each package around it."""
    if name.partition(".")[0] == "raytrain":
        return  # travels by itself
    parts = name.split(".")
    for place in places:
        for end in range(1, len(parts) + 1):
            base = place.joinpath(*parts[:end])
            files = (base / "__init__.py", base.with_name(f"{base.name}.py"))
            yield from (file.relative_to(root) for file in files if file.is_file() and file.is_relative_to(root))


def _included(root: Path, name: str, left_out: list[str]) -> Iterator[Path]:
    """The file ``name``, or the files in the folder ``name``, relative to ``root``."""
    path = Path(os.path.normpath(name))
    if path.is_absolute() or ".." in path.parts or not os.path.lexists(root / path):
        raise UsageError(f"--include: {name} is not in the current folder; what a job needs must be there.")
    _check_own("--include", root, path)
    if not (root / path).is_dir():
        yield path
        return
    for file, why in _walk(root / path, _rules_above(root / path, root)):
        if why is None:
            yield file.relative_to(root)
        else:
            left_out.append(f"{file.relative_to(root)} ({why})")


def _check_own(option: str, root: Path, path: Path) -> None:
    """Raise UsageError if ``path`` is a link, or below one, or likely a secret."""
    if (root / path).resolve() != root / path:
        raise UsageError(f"{option}: {path} is a link, and links are not followed; copy here what the job needs.")
    if path.name and any(_is_secret(root / part) for part in (path, *path.parents[:-1])):
        raise UsageError(
            f"{option}: {path} is hidden or likely a secret, and secrets are not sent; if it is none, rename it."
        )


def _is_secret(path: Path) -> bool:
    if _SECRETS.match_file(path.name.lower()):
        return True
    return path.is_file() and path.stat().st_size <= _MAX_KEY_BYTES and _PRIVATE_KEY in path.read_bytes()


def _walk(folder: Path, inherited: Rules) -> Iterator[tuple[Path, str | None]]:
    """The files in ``folder``, deep, and why one (or a folder) is left out; a .gitignore counts from its folder on."""
    rules = (*inherited, *_rules_in(folder))
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        why = _why_left_out(path, is_folder, rules)
        if is_folder and why is None:
            yield from _walk(path, rules)
        else:
            yield path, why


def _why_left_out(path: Path, is_folder: bool, rules: Rules) -> str | None:
    if path.is_symlink():
        return "a link"
    if _is_secret(path):
        return "hidden or likely a secret"
    if path.name in _FOLDERS_LEFT_OUT or _is_ignored(path, is_folder, rules):
        return "ignored"
    return None if is_folder or path.is_file() else "not a file"


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
