"""Files of a loop's own are kept in the run's storage, whatever else is in its bucket, and training never waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from raytrain.errors import StorageError
from raytrain.monitor.events import DocumentLost, Event, Note
from raytrain.storage.open import open_store
from raytrain.storage.store import Store, StoredObject
from raytrain.training.run_files import RunFiles


@pytest.fixture
def store(s3_url: str) -> Store:
    return open_store(f"{s3_url}/run")


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def files(store: Store, events: list[Event]) -> Iterator[RunFiles]:
    opened = RunFiles(store, 0, events.append)
    yield opened
    opened.close()


def test_a_bucket_has_them_as_soon_as_they_are_sent(files: RunFiles, store: Store, events: list[Event]) -> None:
    (files.folder / "pictures").mkdir()
    (files.folder / "pictures" / "a b.png").write_bytes(b"picture")
    files.keep_changes()
    (files.folder / "last.txt").write_text("last")
    files.close()
    assert store.get("files/pictures/a b.png") == b"picture"
    assert store.get("files/last.txt") == b"last"
    assert [str(event.text) for event in events if isinstance(event, Note)] == [
        "files that the loop writes into run.folder are kept with the run, in files/"
    ]


def test_a_link_that_leads_nowhere_is_left_out(files: RunFiles, store: Store) -> None:
    (files.folder / "nothing").symlink_to("removed")
    (files.folder / "itself").symlink_to("itself")
    (files.folder / "last.txt").write_text("last")
    files.close()
    assert [stored.path for stored in store.list("files/")] == ["files/last.txt"]


def test_an_unused_folder_leaves_nothing(store: Store, events: list[Event]) -> None:
    files = RunFiles(store, 0, events.append)
    files.keep_changes()
    files.close()
    assert not list(store.list()) and not events


def test_a_resume_has_them_again_and_deletes_what_the_loop_deletes(
    files: RunFiles, store: Store, events: list[Event]
) -> None:
    for name in ("kept.csv", "old.pt"):
        (files.folder / name).write_text("1")
    files.close()

    resumed = RunFiles(store, 0, events.append)
    with (resumed.folder / "kept.csv").open("a") as file:
        file.write("2")
    (resumed.folder / "old.pt").unlink()
    resumed.close()
    assert store.get("files/kept.csv") == b"12"
    assert not store.exists("files/old.pt")


def test_only_worker_0_is_kept(store: Store, events: list[Event]) -> None:
    files = RunFiles(store, 1, events.append)
    folder = files.folder
    (folder / "mine").write_text("1")
    files.keep_changes()
    files.close()
    assert not list(store.list()) and not events
    assert not folder.exists()


def test_a_run_in_a_folder_has_them_at_once(tmp_path: Path, events: list[Event]) -> None:
    for rank in (0, 1):
        files = RunFiles(open_store(str(tmp_path)), rank, events.append)
        (files.folder / f"of-{rank}").write_text("1")
        files.close()
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()] == ["files/of-0"]


def test_what_others_put_into_the_bucket_does_no_harm(store: Store, events: list[Event]) -> None:
    store.put("files/good", b"1")
    listed = _Listed(store, ["files/../../escaped", "files/good/too"])  # a bucket may have an object below an object
    files = RunFiles(cast(Store, listed), 0, events.append)
    assert (files.folder / "good").read_text() == "1"
    left_out = [event.text for event in events if isinstance(event, Note) and "is not fetched" in event.text]
    assert len(left_out) == 2 and any("escaped" in text for text in left_out)
    assert not (files.folder.parent.parent / "escaped").exists()
    files.close()
    assert store.get("files/good") == b"1"


def test_storage_that_fails_is_reported_once_and_tried_again(store: Store, events: list[Event]) -> None:
    failing = _Failing(store)
    files = RunFiles(cast(Store, failing), 0, events.append)
    (files.folder / "a.txt").write_text("1")
    files.keep_changes()
    os.utime(files.folder / "a.txt")
    files.close()
    lost = [event for event in events if isinstance(event, DocumentLost)]
    assert [(event.document, event.error) for event in lost] == [("files/a.txt", "no answer")]
    assert failing.num_tries == 2


class _Wrapped:
    """A store but for what a subclass replaces."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.num_tries = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class _Listed(_Wrapped):
    """A bucket in which somebody has put more objects."""

    def __init__(self, store: Store, paths: list[str]) -> None:
        super().__init__(store)
        self._paths = paths

    def list(self, prefix: str) -> Iterator[StoredObject]:
        stored = list(self._store.list(prefix))
        yield from stored
        yield from (stored[0]._replace(path=path) for path in self._paths)

    def get(self, path: str) -> bytes:
        return b"1" if path in self._paths else self._store.get(path)


class _Failing(_Wrapped):
    def put_file(self, path: str, file: Path) -> None:
        self.num_tries += 1
        raise StorageError("no answer")
