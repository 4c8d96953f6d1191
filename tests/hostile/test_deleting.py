"""Only what a run wrote is deleted: never what somebody else put there, and nothing through links."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.errors import UsageError
from raytrain.launch.prepare import settle_options
from raytrain.runs.documents import METRICS, is_run_file
from raytrain.runs.records import delete_run
from raytrain.runs.stored_checkpoints import list_checkpoints
from raytrain.storage.open import open_store
from tests.helpers.small_runs import config, make_images
from tests.helpers.stored_histories import step_row, store_run


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    return make_images(tmp_path / "images")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_files_of_others_and_what_links_lead_to_stay(tmp_path: Path) -> None:
    storage, precious = tmp_path / "runs", tmp_path / "precious"
    run = Path(store_run(str(storage), "old", [step_row(1, loss=1.0)], status="finished").url)  # pyright: ignore
    for path in ("step-000000001.pt", "data.txt"):
        precious.mkdir(exist_ok=True)
        (precious / path).write_text("precious")
    (run / "notes").symlink_to(precious)
    (run / "checkpoints").symlink_to(precious)  # the names of what is in it are those of checkpoints
    (run / "README.md").write_text("mine")
    num_deleted, left = delete_run(str(storage), "old")
    assert files(precious) == {"step-000000001.pt", "data.txt"} and files(run) == {"README.md"}
    assert left == [
        "README.md",
        *(f"{folder}/{name}" for folder in ("checkpoints", "notes") for name in ("data.txt", "step-000000001.pt")),
    ]
    assert num_deleted == 3


def test_what_a_run_writes_is_its_own() -> None:
    own = [METRICS, f"{METRICS}.000001", "checkpoints/step-000000100.pt", "checkpoints/step-000000100.pt.json"]
    own += [
        "logs/worker-0-20260101T000000a1.err",
        "trace/000000001-000000009-00001.parquet",
        "trackers/mlflow.json",
        "rate.png",
    ]
    event_file = "events.out.tfevents.1795975452.a-host.local.1795975452608890939"
    own += [f"tensorboard/{event_file}", f"tensorboard/rates-00/{event_file}"]
    others = [event_file, "tensorboard/events.out.tfevents.1795975452.a-host.local"]
    others += ["checkpoints/my-backup/step-000000100.pt", "checkpoints/step-1.pt", "x/config.json", "metrics.jsonl.bak"]
    assert all(map(is_run_file, own)) and not any(map(is_run_file, others))


def test_a_copy_of_a_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for path in ("checkpoints/step-000000100.pt", "checkpoints/my-backup/step-000000200.pt"):
        store.put(path, b"x")
    assert [found.path for found in list_checkpoints(store)] == ["checkpoints/step-000000100.pt"]


def test_a_new_run_is_refused_in_a_folder_of_other_files(images: Path, tmp_path: Path, s3_url: str) -> None:
    for storage in (str(tmp_path / "runs"), s3_url):
        open_store(storage).put("run/notes.txt", b"mine")
        with pytest.raises(UsageError, match=r"files that no run wrote, such as notes.txt; choose another --name"):
            settle_options(config(images, storage))


@pytest.mark.parametrize(("storage", "name"), [(".", "images"), ("images", "run"), (".", "images/red")])
def test_images_and_a_run_within_each_other_are_refused(storage: str, name: str, images: Path, tmp_path: Path) -> None:
    if "/" in name:
        options = config(images / "red", tmp_path / "images", name="red")
    else:
        options = config(images, tmp_path / storage, name=name)
    with pytest.raises(UsageError, match=r"(one is within the other|holds files that no run wrote)"):
        settle_options(options)
