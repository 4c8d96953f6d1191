"""A job gets the files that the user's own code needs: no images, nothing ignored, no secrets, not too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain import TrainConfig, UsageError
from raytrain.launch.job_files import check_places, job_files

FILES = (
    *("my_loop.py", "settings.json", "parts/net.py", "parts/notes.tmp", "parts/keep.tmp", "big/log.txt"),
    *(".env", ".env.local", "parts/server.pem", ".aws/credentials", "credentials.json", ".netrc"),
    *("images/cat/1.jpg", "images/cat/2.PNG", "runs/first/config.json", ".venv/lib/x.py", "__pycache__/my_loop.pyc"),
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("some text")
    (tmp_path / ".gitignore").write_text("*.tmp\n/big/\n")
    (tmp_path / "parts" / ".gitignore").write_text("!keep.tmp\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(**given: Any) -> TrainConfig:
    return TrainConfig(batch_size=1, **given)


def names(**given: Any) -> set[str]:
    return {str(path) for path in job_files(options(**given)).paths}


def test_the_folder_of_a_loop_without_images_secrets_and_what_is_ignored(project: Path) -> None:
    expected = {"my_loop.py", "settings.json", "parts/net.py", "parts/keep.tmp", ".gitignore", "parts/.gitignore"}
    assert names(loop="my_loop.py:loop") == names(model="my_loop:Net") == expected


def test_only_the_folder_in_which_the_code_is(project: Path) -> None:
    assert names(model="parts/net.py:Net") == {"parts/net.py", "parts/keep.tmp", "parts/.gitignore"}


def test_a_gitignore_of_the_repository_above_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".git").mkdir()
    (project / "parts" / ".gitignore").unlink()
    monkeypatch.chdir(project / "parts")
    assert names(model="net.py:Net") == {"net.py"}


def test_a_module_in_a_package_comes_with_the_whole_package(project: Path) -> None:
    assert names(model="parts.net:Net") == {"parts/net.py", "parts/keep.tmp", "parts/.gitignore"}


@pytest.mark.parametrize("model", ["resnet18", "raytrain.models:cifar10", "installed.package:Net"])
def test_nothing_for_code_that_is_installed(model: str, project: Path) -> None:
    assert names(model=model) == set()


def test_the_files_keep_their_paths(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("job")
    job_files(options(model="parts/net.py:Net")).copy_to(folder)
    assert (folder / "parts" / "net.py").read_text() == "some text"


def test_too_much_is_refused_with_the_largest_file(project: Path) -> None:
    with (project / "weights.bin").open("wb") as file:
        file.truncate(101 * 1024**2)
    with pytest.raises(UsageError, match=r"files of 101 MiB, and Ray takes 100 MiB\. The largest is weights\.bin"):
        job_files(options(loop="my_loop.py:loop"))


@pytest.mark.parametrize("loop", ["/elsewhere/my_loop.py:loop", "../my_loop.py:loop"])
def test_code_outside_the_current_folder_is_refused(loop: str, project: Path) -> None:
    with pytest.raises(UsageError, match="submit from its folder, or from one above it"):
        job_files(options(loop=loop))


def test_a_file_that_is_not_there_is_said_here(project: Path) -> None:
    with pytest.raises(UsageError, match=r"--loop: there is no file your_loop\.py; its path is relative"):
        job_files(options(loop="your_loop.py:loop"))


@pytest.mark.parametrize("given", [{"data": "images"}, {"weights": "first.pt"}, {"storage": "./runs"}])
def test_places_on_this_machine_are_refused(given: dict[str, str]) -> None:
    (option, place) = next(iter(given.items()))
    with pytest.raises(UsageError, match=f"--{option} is {place}, which would be a folder of the job"):
        check_places(options(**{"data": "s3://b/images", "storage": "s3://b/runs", **given}))


def test_buckets_and_shared_disks_are_not(tmp_path: Path) -> None:
    check_places(options(data="s3://b/images", storage=str(tmp_path), weights="DEFAULT"))
