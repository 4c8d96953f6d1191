"""Files of this machine that a job on a cluster needs: what the user's code imports, and what --include names.

The user's code is not run for that. Imports are read from the syntax trees of the files, from one file to the next, as
far as they lead to files below the current folder. Secrets are never sent: if the user names one, that is an error; if
it lies in a folder of files to send, it is left out and reported.

Ray's own packaging is not used for that: it does not read .gitignore files above the folder, ignores "!" patterns in
those below it, and does not say what it leaves out.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from raytrain.config import TrainConfig
from raytrain.config.options import own_functions
from raytrain.errors import UsageError, current_folder, flag

_MAX_BYTES = 100 * 1024**2  # Ray's limit
_SECRET_NAMES = (
    *(".*", "*credential*", "*secret*", "*password*", "*service*account*", "*token*.json", "id_rsa*", "id_dsa*"),
    *("id_ecdsa*", "id_ed25519*", "*kubeconfig*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx"),
    *("*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.gpg", "*history"),
)
_SECRETS = GitIgnoreSpec.from_lines(_SECRET_NAMES)
_PRIVATE_KEY, _MAX_KEY_BYTES = b"PRIVATE KEY-----", 1024**2
_FOLDERS_LEFT_OUT = {"venv", "node_modules", "__pycache__", "runs"}
Rules = tuple[tuple[Path, GitIgnoreSpec], ...]
"""The .gitignore files that apply to a folder, each with the folder that it is in, the outermost first."""


@dataclass(frozen=True)
class JobFiles:
    """Files below ``folder``, by their ``paths`` relative to it.

    ``left_out`` has a text for each file that is not taken, and for each folder that is not entered: its path, with the
    reason in brackets. ``include`` is what the user has named in addition.
    """

    folder: Path
    paths: tuple[Path, ...]
    left_out: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes, by its path."""
        return {path.as_posix(): (self.folder / path).stat().st_size for path in self.paths}

    def copy_to(self, folder: Path) -> None:
        """Copy the files into ``folder``, under the same paths."""
        for path in self.paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path, folder / path, follow_symlinks=False)


def job_files(config: TrainConfig, include: Sequence[str] = (), config_file: str | None = None) -> JobFiles:
    """Return the files that the user's functions are in and import from below the current folder, and ``include``.

    ``include`` names files and folders. ``config_file``, which the command names, is among the files, unless it is a
    URL or an absolute path, which all machines can reach.

    Raises UsageError if one of these files is a link, is outside of the current folder, is likely a secret, may not be
    read or cannot be parsed as Python, or if all together are more than Ray takes. In a folder that ``include`` names,
    files are left out instead if they are links, secrets or named by a .gitignore, or if this user may not read them.

    Example:
        >>> job_files(TrainConfig(loop="loop.py:train"), include=["labels.csv"]).paths
        (PosixPath('labels.csv'), PosixPath('loop.py'))
    """
    current = Path(current_folder()).resolve()
    left_out: list[str] = []
    paths: set[Path] = set()
    for option, name in own_functions(config):
        paths |= _files_of_function(current, option, name)
    for name in include:
        paths |= _included(current, "--include", name, left_out)
    if config_file is not None and "://" not in config_file and not Path(config_file).is_absolute():
        paths |= _included(current, "--config", config_file, left_out)

    # Ray would refuse too many bytes, too, but cannot name the largest file.
    files = JobFiles(current, tuple(sorted(paths)), tuple(sorted(left_out)), tuple(include))
    if (total := sum(files.sizes.values())) > _MAX_BYTES:
        largest = max(files.sizes, key=files.sizes.__getitem__)
        raise UsageError(
            f"The job needs files of {total / 1024**2:.0f} MiB, and Ray takes 100 MiB. The largest is {largest}; "
            "include less, or put it into the bucket."
        )
    return files


def _files_of_function(root: Path, option: str, name: str) -> set[Path]:
    """Return the file of a function and all files that it imports, directly or not, relative to ``root``.

    ``name`` is the value of ``option``. Modules that are not below ``root`` are left out: the cluster has installed
    them. Raises UsageError if the file is missing, is not below ``root``, or may not be sent.
    """
    # A function is named with its file or its module: loop.py:train, or package.loop:train. A file may import modules
    # from its own folder, too.
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise UsageError(f"{flag(option)} is {name}; submit from its folder, or from one above it.")
        if not Path(place).is_file():
            raise UsageError(f"{flag(option)}: there is no file {place}; its path is relative to the current folder.")
        folders = root, root / Path(place).parent
        waiting = [Path(place)]
    else:
        folders = (root,)
        waiting = [*_files_of_module(place, folders, root)]

    paths: set[Path] = set()
    while waiting:
        if (path := waiting.pop()) in paths:
            continue
        paths.add(path)
        _check_may_be_sent(flag(option), root, path)
        try:
            nodes = list(ast.walk(ast.parse((root / path).read_bytes())))
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{flag(option)}: {path} cannot be read as Python ({error}).") from None
        # Follow the imports anywhere in the code. A name imported from a package may be a module or an attribute.
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    waiting += _files_of_module(alias.name, folders, root)
            elif isinstance(node, ast.ImportFrom):
                # A relative import with n dots starts in the n-th folder above the file.
                start = (root / path).parents[node.level - 1 : node.level] if node.level else folders
                for alias in node.names:
                    waiting += _files_of_module(f"{node.module or ''}.{alias.name}".lstrip("."), start, root)
    return paths


def _files_of_module(name: str, folders: Iterable[Path], root: Path) -> Iterator[Path]:
    """Yield the files in ``folders`` of the module or the attribute ``name``, and of each package around it.

    Their paths are relative to ``root``; files outside of it are left out.
    """
    if name.partition(".")[0] == "raytrain":
        return  # the cluster has raytrain itself
    # The import of a module also runs the __init__.py of each package around it.
    parts = name.split(".")
    for folder in folders:
        for end in range(1, len(parts) + 1):
            base = folder.joinpath(*parts[:end])
            files = (base / "__init__.py", base.with_name(f"{base.name}.py"))
            yield from (file.relative_to(root) for file in files if file.is_file() and file.is_relative_to(root))


def _included(root: Path, option: str, name: str, left_out: list[str]) -> set[Path]:
    """Return the file ``name``, or the files in the folder ``name``, relative to ``root``.

    Files that are left out are added to ``left_out``, each with the reason. Raises UsageError if ``name``, the value of
    ``option``, is not below ``root``, or may not be sent.
    """
    path = Path(os.path.normpath(name))
    if path.is_absolute() or ".." in path.parts or not os.path.lexists(root / path):
        raise UsageError(f"{option}: {name} is not in the current folder; what a job needs must be there.")
    _check_may_be_sent(option, root, path)
    folder = root / path
    if not folder.is_dir():
        return {path}

    # .gitignore files apply from the top of the repository down; without a repository, from ``root`` down.
    top = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), root)
    above = [parent for parent in reversed(folder.parents) if parent.is_relative_to(top)]
    rules = tuple(rule for parent in above for rule in _rules_in(parent))
    paths: set[Path] = set()
    for file, why_left_out in _walk(folder, rules):
        if why_left_out is None:
            paths.add(file.relative_to(root))
        else:
            left_out.append(f"{file.relative_to(root)} ({why_left_out})")
    return paths


def _check_may_be_sent(option: str, root: Path, path: Path) -> None:
    """Raise UsageError if ``path``, below ``root``, is a link, likely a secret, or may not be read by this user.

    It is also raised if one of the folders that ``path`` is in is a link, or likely a secret by its name.
    """
    # A link may lead to a secret that has another name.
    if (root / path).resolve() != root / path:
        raise UsageError(f"{option}: {path} is a link, and links are not followed; copy here what the job needs.")
    if not _may_be_read(root / path):
        raise UsageError(f"{option}: {path} may not be read by you, as `ls -ld {path}` shows; `chmod` changes that.")
    if path.name and any(_is_secret(root / part) for part in (path, *path.parents[:-1])):
        raise UsageError(
            f"{option}: {path} is hidden or likely a secret, and secrets are not sent; if it is none, rename it."
        )


def _is_secret(path: Path) -> bool:
    """Return whether ``path`` has a name that secrets often have, or holds a private key."""
    if _SECRETS.match_file(path.name.lower()):
        return True
    return path.is_file() and path.stat().st_size <= _MAX_KEY_BYTES and _PRIVATE_KEY in path.read_bytes()


def _may_be_read(path: Path) -> bool:
    """Return whether this user may read a file, or list a folder and reach what is in it."""
    return os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)


def _walk(folder: Path, inherited: Rules) -> Iterator[tuple[Path, str | None]]:
    """Yield each file below ``folder``, with None if it is taken, or with the reason why it is left out.

    A folder that is left out is yielded like a file, and not entered. The rules of a .gitignore apply to its folder and
    below; ``inherited`` are the rules of the folders above.
    """
    rules = (*inherited, *_rules_in(folder))
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        # The innermost .gitignore that has a pattern for a path decides. Its verdict is True if the path is ignored,
        # False if a pattern with "!" takes it back, and None if no pattern is for the path.
        end = "/" if is_folder else ""
        verdicts = (
            spec.check_file(f"{path.relative_to(rules_folder).as_posix()}{end}").include
            for rules_folder, spec in reversed(rules)
        )
        is_ignored = next((verdict for verdict in verdicts if verdict is not None), False)
        if path.is_symlink():
            yield path, "a link"
        elif not _may_be_read(path):
            yield path, "not readable by you"
        elif _is_secret(path):
            yield path, "hidden or likely a secret"
        elif path.name in _FOLDERS_LEFT_OUT or is_ignored:
            yield path, "ignored"
        elif is_folder:
            yield from _walk(path, rules)
        else:
            yield path, None if path.is_file() else "not a file"


def _rules_in(folder: Path) -> Rules:
    """Return the rules of the .gitignore in ``folder``; empty if there is none."""
    file = folder / ".gitignore"
    if not file.is_file():
        return ()
    return ((folder, GitIgnoreSpec.from_lines(file.read_text(errors="replace").splitlines())),)
