"""A job gets the files that the user's code imports and those that --include names; no links, no secrets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain import TrainConfig, UsageError
from raytrain.launch.job_files import job_files
from raytrain.launch.option_checks import check_places

CODE = {
    "my_loop.py": "import torch, helper\nfrom parts import net\n\ndef loop(run):\n    import late.one\n",
    "helper.py": "import my_loop",
    "unused.py": "",
    "parts/__init__.py": "",
    "parts/net.py": "from . import blocks\nfrom .deep.stem import stem",
    "parts/blocks.py": "",
    "parts/deep/stem.py": "from ..blocks import x",
    "parts/other.py": "",
    "late/one.py": "",
}
SECRETS = (
    *(
        ".git-credentials",
        ".pypirc",
        "service-account.json",
        "my-service_account-2.json",
        "client.p12",
        ".bash_history",
    ),
    *(".env", ".env.local", "server.pem", ".netrc", "credentials.json", "id_rsa", ".npmrc", ".python_history", "a.pfx"),
    *(".aws/config", ".config/gcloud/application_default_credentials.json", ".azure/tokens", ".docker/config.json"),
    *(".kube/config", "kubeconfig", "known.ENV", "secrets.yaml", "my.keystore", "token.json", ".pgpass", ".ssh/config"),
)
PRIVATE_KEY = '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}'
NOBODY = 65534  # number of a user
OTHERS = ("settings.json", "conf/a.yaml", "conf/notes.tmp", "conf/cat.jpg", "conf/.hidden/x", "conf/deep/b.yaml")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = CODE | dict.fromkeys(OTHERS, "text") | {".gitignore": "*.tmp\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(**given: Any) -> TrainConfig:
    return TrainConfig(batch_size=1, **given)


def names(*include: str, **given: Any) -> set[str]:
    return {str(path) for path in job_files(options(**given), include).paths}


def test_a_loop_comes_with_what_it_imports_and_nothing_else(project: Path) -> None:
    expected = set(CODE) - {"unused.py", "parts/other.py"}
    assert names(loop="my_loop.py:loop") == names(model="my_loop:Net") == expected


def test_a_module_in_a_package_comes_with_its_package_and_its_imports(project: Path) -> None:
    expected = {"parts/__init__.py", "parts/net.py", "parts/blocks.py", "parts/deep/stem.py"}
    assert names(model="parts.net:Net") == expected


def test_a_file_in_a_folder_imports_what_is_beside_it(project: Path) -> None:
    (project / "late" / "beside.py").write_text("")
    (project / "late" / "one.py").write_text("import beside, helper")
    assert names(model="late/one.py:Net") >= {"late/one.py", "late/beside.py", "helper.py"}


@pytest.mark.parametrize("model", ["resnet18", "raytrain.models:cifar10", "installed.package:Net"])
def test_nothing_for_code_that_is_installed(model: str, project: Path) -> None:
    assert names(model=model) == set()


def test_include_names_files_and_folders(project: Path) -> None:
    expected = {"settings.json", "conf/a.yaml", "conf/cat.jpg", "conf/deep/b.yaml"}  # nothing ignored, nothing hidden
    assert names("settings.json", "conf") == expected
    assert names("conf/notes.tmp", "conf/cat.jpg") == {"conf/notes.tmp", "conf/cat.jpg"}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_never_travels(name: str, project: Path) -> None:
    (project / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
    (project / "conf" / name).write_text("hunter2")
    assert names("conf") == names("conf/a.yaml", "conf/cat.jpg", "conf/deep")
    assert names(".") <= set(CODE) | set(OTHERS)
    with pytest.raises(UsageError, match="is hidden or likely a secret, and secrets are not sent"):
        names(f"conf/{name}")


def test_a_private_key_is_known_by_its_content(project: Path) -> None:
    (project / "conf" / "robot.json").write_text(PRIVATE_KEY)
    files = job_files(options(), ["conf"])
    assert "conf/robot.json" not in map(str, files.paths)
    assert "conf/robot.json (hidden or likely a secret)" in files.left_out


def test_links_are_not_followed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "a.txt").write_text("private")
    (project / "conf" / "shadow").symlink_to("/etc/shadow")
    (project / "conf" / "outside").symlink_to(outside)
    files = job_files(options(), ["conf"])
    assert {str(path) for path in files.paths} == {"conf/a.yaml", "conf/cat.jpg", "conf/deep/b.yaml"}
    assert {"conf/outside (a link)", "conf/shadow (a link)"} < set(files.left_out)
    for name in ("conf/shadow", "conf/outside", "conf/outside/a.txt"):
        with pytest.raises(UsageError, match=f"--include: {name} is a link"):
            names(name)


def test_a_module_that_is_a_link_is_refused(project: Path) -> None:
    (project / "helper.py").unlink()
    (project / "helper.py").symlink_to("unused.py")
    with pytest.raises(UsageError, match=r"--loop: helper\.py is a link, and links are not followed"):
        names(loop="my_loop.py:loop")


def test_a_module_with_a_syntax_error_is_said_here(project: Path) -> None:
    (project / "helper.py").write_text("def broken(:")
    with pytest.raises(UsageError, match=r"--loop: helper\.py cannot be read as Python \(.*line 1"):
        names(loop="my_loop.py:loop")


@pytest.fixture
def as_common_user() -> Iterator[None]:
    """This user or, in place of root, who may read all files, another one."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(NOBODY, NOBODY, 0)
    yield
    if is_root:
        os.setresuid(0, 0, 0)


def test_what_may_not_be_read_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch, as_common_user: None) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are for root alone
        monkeypatch.chdir(folder)
        for name in ("data/open.csv", "data/closed.csv", "data/database/rows"):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text("text")
        for closed in (Path("data/closed.csv"), Path("data/database")):
            closed.chmod(0)
        files = job_files(options(), ["data"])
        assert [str(path) for path in files.paths] == ["data/open.csv"]
        reason = "(not readable by you)"
        assert files.left_out == (f"data/closed.csv {reason}", f"data/database {reason}")
        for name in ("data/closed.csv", "data/database"):
            with pytest.raises(UsageError, match=f"--include: {name} may not be read by you"):
                job_files(options(), [name])
        Path("data/database").chmod(0o700)
        monkeypatch.undo()


def test_the_files_keep_their_paths(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("job")
    job_files(options(model="parts/net.py:Net"), ["settings.json"]).copy_to(folder)
    assert (folder / "parts" / "net.py").read_text() == CODE["parts/net.py"]
    assert (folder / "settings.json").read_text() == "text"


def test_too_much_is_refused_with_the_largest_file(project: Path) -> None:
    with (project / "weights.bin").open("wb") as file:
        file.truncate(101 * 1024**2)
    with pytest.raises(UsageError, match=r"files of 101 MiB, and Ray takes 100 MiB\. The largest is weights\.bin"):
        names("weights.bin", loop="my_loop.py:loop")


@pytest.mark.parametrize("loop", ["/elsewhere/my_loop.py:loop", "../my_loop.py:loop"])
def test_code_outside_the_current_folder_is_refused(loop: str, project: Path) -> None:
    with pytest.raises(UsageError, match="submit from its folder, or from one above it"):
        names(loop=loop)


@pytest.mark.parametrize("name", ["/etc/hosts", "../settings.json", "none.json"])
def test_what_is_not_in_the_current_folder_cannot_be_included(name: str, project: Path) -> None:
    with pytest.raises(UsageError, match=f"--include: {name} is not in the current folder"):
        names(name)


def test_a_file_that_is_not_there_is_said_here(project: Path) -> None:
    with pytest.raises(UsageError, match=r"--loop: there is no file your_loop\.py; its path is relative"):
        names(loop="your_loop.py:loop")


@pytest.mark.parametrize("given", [{"data": "images"}, {"weights": "first.pt"}, {"storage": "./runs"}])
def test_places_on_this_machine_are_refused(given: dict[str, str]) -> None:
    (option, place) = next(iter(given.items()))
    with pytest.raises(UsageError, match=f"--{option} is {place}, which the job would look for in a temporary folder"):
        check_places(options(**{"data": "s3://b/images", "storage": "s3://b/runs", **given}))


def test_buckets_and_shared_disks_are_not(tmp_path: Path) -> None:
    check_places(options(data="s3://b/images", storage=str(tmp_path), weights="DEFAULT"))
