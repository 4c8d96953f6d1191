"""Folders with links, pipes and other surprises in them."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from raytrain.cli.main import main
from raytrain.config import TrainConfig
from raytrain.data.dataset import open_dataset
from raytrain.data.labels.folders import build_manifest
from raytrain.datasets.pack import pack
from raytrain.datasets.upload import upload
from raytrain.errors import StorageError, UsageError
from raytrain.runs import ownership
from raytrain.runs.ownership import claim_run
from raytrain.storage import folder as folders
from raytrain.storage.locks import acquire
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder
from tests.helpers.small_runs import make_images
from tests.helpers.waiting import wait_for

SECRET = b"[default]\naws_secret_access_key = hunter2\n"


Link = Callable[[Path, Path], None]


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in three class folders, and beside them, outside, a file with credentials."""
    (tmp_path / "images").mkdir()
    (tmp_path / "home" / "aws").mkdir(parents=True)
    (tmp_path / "home" / "aws" / "credentials.png").write_bytes(SECRET)
    return make_images(tmp_path / "images", 9)


# Links that leave the folder. What only reads images follows them; what copies files elsewhere does not.


def link_file(folder: Path, tmp_path: Path) -> None:
    (folder / "red" / "x.png").symlink_to(tmp_path / "home/aws/credentials.png")


def link_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "owl").symlink_to(tmp_path / "home" / "aws")


def link_through_a_link(folder: Path, tmp_path: Path) -> None:
    (folder / "red" / ".hidden").symlink_to(tmp_path / "home")
    (folder / "red" / "x.png").symlink_to("../red/.hidden/aws/credentials.png")


def link_to_a_sibling_of_the_same_beginning(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").rename(tmp_path / "images2")
    (folder / "red" / "x.png").symlink_to("../../images2/aws/credentials.png")


LINKS = [link_file, link_folder, link_through_a_link, link_to_a_sibling_of_the_same_beginning]


@pytest.mark.parametrize("link", LINKS)
def test_upload_does_not_follow_links_out_of_the_folder(link: Link, folder: Path, tmp_path: Path, s3_url: str) -> None:
    link(folder, tmp_path)
    with pytest.raises(
        UsageError,
        match=r"1 of 10 files in .*images are links that lead out of it, such as (red/x|owl/credentials).png",
    ):
        upload(str(folder), s3_url, quiet())
    assert list(open_store(s3_url).list()) == []


@pytest.mark.parametrize("link", LINKS)
def test_packing_does_not_follow_links_out_of_the_folder(link: Link, folder: Path, tmp_path: Path) -> None:
    link(folder, tmp_path)
    with pytest.raises(UsageError, match=r"1 of 10 files in .*images are links that lead out of it"):
        pack(str(folder), str(tmp_path / "packed"), console=quiet())
    assert not (tmp_path / "packed").exists()


def test_upload_follows_links_within_the_folder(folder: Path, tmp_path: Path, s3_url: str) -> None:
    (folder / "red" / "again.png").symlink_to("../blue/000.png")
    (folder / "crimson").symlink_to("red")
    (tmp_path / "elsewhere").symlink_to(folder)
    assert upload(str(tmp_path / "elsewhere"), s3_url, quiet()).num_files == 9 + 1 + 4
    with pytest.raises(UsageError, match=r"crimson/ and red/ in .* are one folder, by a link"):
        pack(str(tmp_path / "elsewhere"), str(tmp_path / "packed"), console=quiet())
    (folder / "crimson").unlink()
    assert pack(str(tmp_path / "elsewhere"), str(tmp_path / "packed"), console=quiet()).num_images == 10


def test_a_data_set_that_consists_of_links_can_be_trained_on(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    for name in ("red", "blue"):
        (tmp_path / "some" / name).symlink_to(folder / name)
    assert len(build_manifest(open_store(str(tmp_path / "some")))) == 6


def test_the_command_refuses_it(folder: Path, tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    link_file(folder, tmp_path)
    assert main(["upload", str(folder), s3_url]) == 2
    assert "cp -rL" in capsys.readouterr().err


# Pipes and devices.


@pytest.mark.timeout(60)
def test_pipes_and_devices_are_no_files_and_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(folder / "red" / "pipe.png")
    (folder / "red" / "endless.png").symlink_to("/dev/zero")
    store = open_store(str(folder))
    assert len(build_manifest(store)) == 9
    assert "2 pipes, sockets and devices" in caplog.text
    for name in ("red/pipe.png", "red/endless.png"):
        with pytest.raises(StorageError, match=f"{name} is not a file but a pipe or a device; remove it"):
            store.get(name)


def test_a_link_to_itself_leads_nowhere_and_costs_no_other_image(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "red" / "loop.png").symlink_to("loop.png")
    (folder / "blue" / "there.png").symlink_to("back.png")
    (folder / "blue" / "back.png").symlink_to("there.png")
    assert len(build_manifest(open_store(str(folder)))) == 9
    assert "3 links that lead nowhere" in caplog.text


@pytest.mark.timeout(60)
def test_a_pipe_as_index_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "packed.parquet")
    with pytest.raises(StorageError, match=r"packed.parquet is not a file but a pipe or a device"):
        build_manifest(open_store(str(folder)))


# Temporary folders.


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


MAKE_A_FOLDER = """
import os
from raytrain.storage.temporary_files import TemporaryFolder
folder = TemporaryFolder()
print(folder.path, flush=True)
os._exit(0)
"""


def abandoned(temporary: Path) -> Path:
    """The folder of a process that was killed."""
    command, environment = [sys.executable, "-c", MAKE_A_FOLDER], {"TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.mark.timeout(60)
def test_a_pipe_instead_of_a_lock_holds_nobody_up(temporary: Path) -> None:
    for name in ("raytrain-abcdefgh", "raytrain-other"):
        (temporary / name).mkdir()
        os.mkfifo(temporary / name / "lock")
    with TemporaryFolder() as ours:
        assert ours.exists()
    assert len(list(temporary.iterdir())) == 2


@pytest.mark.parametrize("name", ["raytrain-runs", "raytrain-abcdefgh"])
@pytest.mark.parametrize("content", ["", "of mine"])
def test_a_users_own_folder_is_kept(name: str, content: str, temporary: Path) -> None:
    (temporary / name).mkdir()
    (temporary / name / "lock").write_text(content)
    (temporary / name / "results.csv").write_text("a year's work")
    TemporaryFolder().remove()
    assert (temporary / name / "results.csv").exists()


def test_links_to_folders_and_locks_are_not_followed(temporary: Path, tmp_path: Path) -> None:
    kept = abandoned(temporary)
    kept = kept.rename(tmp_path / "kept")
    (temporary / "raytrain-abcdefgh").symlink_to(kept)
    (temporary / "raytrain-abcdefgi").mkdir(mode=0o700)
    (temporary / "raytrain-abcdefgi" / "lock").symlink_to(kept / "lock")
    TemporaryFolder().remove()
    assert (kept / "lock").exists() and (temporary / "raytrain-abcdefgi").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_folders_of_other_users_are_kept(temporary: Path) -> None:
    folder = abandoned(temporary)
    os.chown(folder, 12345, 12345)
    TemporaryFolder().remove()
    assert folder.exists()


def test_the_folder_of_a_killed_process_is_still_removed(temporary: Path) -> None:
    folder = abandoned(temporary)
    assert folder.exists()
    TemporaryFolder().remove()
    assert not folder.exists()


# Training and validation images in one folder.


@pytest.mark.parametrize("test", ["test", "val", "validation"])
def test_a_folder_of_training_and_test_images_is_not_one_data_set(
    test: str, folder: Path, tmp_path: Path, s3_url: str
) -> None:
    (tmp_path / "both").mkdir()
    shutil.copytree(folder, tmp_path / "both" / "train")
    shutil.copytree(folder, tmp_path / "both" / test)
    both = str(tmp_path / "both")
    data = open_dataset(TrainConfig(data=both, batch_size=2, learning_rate=1), open_store(str(tmp_path / "run")))
    assert (len(data.train), len(data.validation)) == (9, 9)
    assert {key.split("/")[0] for key in data.train.keys.to_pylist()} == {"train"}
    assert {key.split("/")[0] for key in data.validation.keys.to_pylist()} == {test}
    with pytest.raises(UsageError, match=f"{both} contains train/ and {test}/, .*such as {both}/train"):
        pack(both, str(tmp_path / "packed"), console=quiet())
    upload(both, s3_url, quiet())
    with pytest.raises(UsageError, match=f"{s3_url} contains train/ and {test}/"):
        build_manifest(open_store(s3_url))
    apart = TrainConfig(data=f"{both}/train", test_data=f"{both}/{test}", batch_size=2, learning_rate=1)
    assert len(open_dataset(apart, open_store(str(tmp_path / "run"))).train) == 9


def test_classes_called_train_and_test_stay_classes(folder: Path) -> None:
    (folder / "red").rename(folder / "train")
    (folder / "blue").rename(folder / "test")
    assert build_manifest(open_store(str(folder))).classes == ("green", "test", "train")
    (folder / "train" / "steam").mkdir()
    (folder / "train" / "000.png").rename(folder / "train" / "steam" / "000.png")
    (folder / "test" / "pencil").mkdir()
    (folder / "test" / "000.png").rename(folder / "test" / "pencil" / "000.png")
    assert build_manifest(open_store(str(folder))).classes == ("green", "test", "train")


HALTED = """
import os, signal, sys
from raytrain.runs.ownership import claim_run
from raytrain.storage.open import open_store
store = open_store(sys.argv[1])
claim = claim_run(store, "run")
with store._locked("claim.json"):
    os.kill(os.getpid(), signal.SIGSTOP)
claim.close()
"""


def claim(folder: Path) -> None:
    with suppress(UsageError):  # the other one renews its claim, once it goes on
        claim_run(open_store(str(folder)), "run").close()


def test_an_owner_that_is_halted_in_the_middle_of_a_write_is_named_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders, "REPORT_AFTER_S", 0.1)
    # Whether an owner is alive takes its real successor half a minute to see.
    monkeypatch.setattr(ownership, "LEASE_S", 0.1)
    halted = subprocess.Popen([sys.executable, "-c", HALTED, str(tmp_path)])
    try:
        os.waitid(os.P_PID, halted.pid, os.WSTOPPED)
        next_one = threading.Thread(target=claim, args=(tmp_path,))
        next_one.start()
        said = f"waiting for process {halted.pid} on {os.uname().nodename}, which writes to {tmp_path}; if it is halted"
        wait_for(lambda: said in caplog.text, "nobody says whom the next owner waits for")
    finally:
        halted.send_signal(signal.SIGCONT)
        halted.wait()
    next_one.join()


@pytest.mark.parametrize(
    "ask", [lambda store: store.put_if("a", b"new", None), lambda store: store.has_conditional_puts()]
)
def test_a_folder_that_its_owner_removes_is_made_again_by_who_waits(
    ask: Callable[[Store], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders, "REPORT_AFTER_S", 0.1)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    run = tmp_path / "run"
    run.mkdir()
    names = [run / "a.lock", run / f".condition-check-{uuid.UUID(int=0).hex}.lock"]
    locks = [acquire(name) for name in names]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, open_store(str(run)))
        wait_for(lambda: "waiting for" in caplog.text, "nobody waits for the lock")
        shutil.rmtree(run)
        for lock in locks:
            os.close(lock.descriptor)
        waiting.result(10)
    assert [file.name for file in run.iterdir()] in (["a"], [])


def test_a_lock_whose_file_cannot_be_deleted_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(StorageError, match="Input/output error"):
            store.put_if("a", b"1", None)
    acquire(tmp_path / "a.lock", wait=False).release()
    store.put_if("a", b"2", b"1")
