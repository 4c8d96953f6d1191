"""Downloading public data sets, from a local server with small archives of the same structure."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from raytrain.data.labels.folders import build_manifest
from raytrain.datasets import download
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store

NAMES = ["airplane", "bird", "cat"]


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the URL that serves it."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def archive(file: Path, contents: dict[str, bytes]) -> str:
    """Write a .tgz file, and return its MD5."""
    with tarfile.open(file, "w:gz") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.md5(file.read_bytes()).hexdigest()


def quietly(name: str, destination: Path | str) -> download.DownloadResult:
    return download.download(name, str(destination), Console(file=io.StringIO()))


@pytest.fixture
def flowers(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive with three flowers."""
    folder, url = served
    names = ("daisy/1.jpg", "daisy/2.jpg", "tulips/3.jpg", "LICENSE.txt")
    monkeypatch.setattr(
        download,
        "FLOWERS_MD5",
        archive(folder / "flowers.tgz", {f"flower_photos/{name}": name.encode() for name in names}),
    )
    monkeypatch.setattr(download, "FLOWERS_URL", f"{url}/flowers.tgz")
    return folder / "flowers.tgz"


@pytest.fixture
def cifar10(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Pixels (n, 3072) of two training batches of three images and a test batch of two; labels count 0, 1, 2, 0, …"""
    from torchvision.datasets import CIFAR10

    folder, url = served
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3072), np.uint8)
    batches = {"data_batch_1": slice(0, 3), "data_batch_2": slice(3, 6), "test_batch": slice(6, 8)}
    files = {
        name: pickle.dumps({"data": pixels[rows], "labels": [i % 3 for i in range(rows.start, rows.stop)]})
        for name, rows in batches.items()
    }
    files["batches.meta"] = pickle.dumps({"label_names": NAMES})
    digests = {name: hashlib.md5(data).hexdigest() for name, data in files.items()}
    md5 = archive(folder / CIFAR10.filename, {f"{CIFAR10.base_folder}/{name}": data for name, data in files.items()})
    monkeypatch.setattr(CIFAR10, "url", f"{url}/{CIFAR10.filename}")
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5)
    monkeypatch.setattr(CIFAR10, "train_list", [[name, digests[name]] for name in ("data_batch_1", "data_batch_2")])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", digests["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": digests["batches.meta"]})
    return pixels


def test_cifar10_becomes_class_folders_with_the_same_pixels(cifar10: np.ndarray, tmp_path: Path) -> None:
    result = quietly("cifar10", tmp_path / "cifar10")
    assert result == download.DownloadResult("cifar10", str(tmp_path / "cifar10"), num_images=8)
    train, test = (
        build_manifest(open_store(str(tmp_path / "cifar10" / part)), classes=tuple(NAMES)) for part in ("train", "test")
    )
    assert (len(train), len(test)) == (6, 2)
    assert sorted(train.keys.to_pylist())[:2] == ["airplane/00000.png", "airplane/00003.png"]
    image = np.asarray(Image.open(tmp_path / "cifar10" / "train" / "bird" / "00004.png"))
    assert (image == cifar10[4].reshape(3, 32, 32).transpose(1, 2, 0)).all()


def test_flowers_become_class_folders(flowers: Path, tmp_path: Path) -> None:
    assert quietly("flowers", tmp_path / "flowers").num_images == 3
    manifest = build_manifest(open_store(str(tmp_path / "flowers")))
    assert manifest.classes == ("daisy", "tulips") and len(manifest) == 3
    assert sorted(path.name for path in (tmp_path / "flowers").iterdir()) == ["LICENSE.txt", "daisy", "tulips"]


def test_a_truncated_or_missing_download_is_an_error_and_can_be_repeated(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = flowers.read_bytes()
    flowers.write_bytes(right[:-20])
    with pytest.raises(
        StorageError, match=r"flowers could not be downloaded into .*flowers \(.*corrupted.*\); check the network"
    ):
        quietly("flowers", tmp_path / "flowers")
    flowers.unlink()
    with pytest.raises(StorageError, match="404"):
        quietly("flowers", tmp_path / "flowers")
    flowers.write_bytes(right)
    assert quietly("flowers", tmp_path / "flowers").num_images == 3


def test_wrong_names_and_destinations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no data set 'mnist'; choose cifar10 or flowers\."):
        quietly("mnist", tmp_path / "mnist")
    with pytest.raises(UsageError, match="s3://bucket/flowers is not a folder"):
        quietly("flowers", "s3://bucket/flowers")
    with pytest.raises(StorageError, match="/proc/flowers cannot be written: no folder and no file can be made there"):
        quietly("flowers", "/proc/flowers")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(UsageError, match="full is not empty; give a new one"):
        quietly("flowers", tmp_path / "full")
