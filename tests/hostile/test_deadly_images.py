"""An image that kills the process that decodes it is an unreadable image, and what reads it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from raytrain.config import TrainConfig
from raytrain.data.dataset import open_dataset
from raytrain.data.images import decode_process
from raytrain.data.images.decode import decode
from raytrain.data.images.decode_process import DecodeProcess
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import BadImage, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.storage.open import open_store
from tests.helpers.deadly_images import make_images
from tests.helpers.image_files import encoded

DECODER = Path(__file__).parents[1] / "helpers" / "deadly_decoder"
SHAPE = ImageShape(12, 12, 3)
GOOD = encoded(np.full((12, 12, 3), 90, np.uint8), "JPEG")


def deadly(kind: str) -> bytes:
    return encoded(Image.new("RGB", (12, 12)), "JPEG", comment=f"deadly:{kind}".encode())


@pytest.fixture
def deadly_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DECODER)


@pytest.mark.usefixtures("deadly_decoder")
@pytest.mark.parametrize(
    ("kind", "ended"), [("segfault", "SIGSEGV"), ("exit", "exit status 0"), ("memory", "exit status 1")]
)
def test_an_image_that_kills_its_process_is_unreadable_and_the_others_are_decoded(kind: str, ended: str) -> None:
    with DecodeProcess(SHAPE) as process:
        assert (process.decode(GOOD) == decode(GOOD, SHAPE)).all()
        for _ in range(2):
            with pytest.raises(BadImage, match=rf"^decoding it ends the process \({ended}\)$"):
                process.decode(deadly(kind))
            assert (process.decode(GOOD) == decode(GOOD, SHAPE)).all()


def test_an_image_that_takes_too_long_is_unreadable_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_process, "_MAX_S", 0.001)
    with DecodeProcess(SHAPE) as process, pytest.raises(BadImage, match=r"^decoding it takes over 0\.001 s$"):
        process.decode(encoded(Image.new("RGB", (3000, 3000)), "PNG"))


def test_a_process_that_was_killed_once_decodes_the_image_at_the_second_try() -> None:
    with DecodeProcess(SHAPE) as process:
        process.decode(GOOD)
        (child,) = (each for each in psutil.Process().children() if "decode_process" in " ".join(each.cmdline()))
        child.send_signal(signal.SIGKILL)
        assert (process.decode(GOOD) == decode(GOOD, SHAPE)).all()
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize("moment", ["start", "image"])
def test_an_image_gets_its_own_pixels_after_an_interruption(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a Ctrl-C, the process must not answer with the image that was interrupted."""

    def interrupted(connection: Connection) -> bytes:
        raise KeyboardInterrupt

    other = encoded(np.full((12, 12, 3), 200, np.uint8), "JPEG")
    with DecodeProcess(SHAPE) as process:
        if moment == "image":
            process.decode(GOOD)
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "recv_bytes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                process.decode(other)
        assert (process.decode(GOOD) == decode(GOOD, SHAPE)).all()
    assert not decoders()


def test_a_bad_image_is_told_as_elsewhere_and_ends_no_process() -> None:
    with DecodeProcess(SHAPE) as process:
        for _ in range(2):
            with pytest.raises(BadImage, match=r"^the file is empty$"):
                process.decode(b"")
        assert process.decode(GOOD).shape == (12, 12, 3)


def test_a_process_that_cannot_start_says_why_and_is_not_taken_for_a_bad_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no memory is left >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    expected = r"could not start \(exit status 1; no memory is left\)"
    with DecodeProcess(SHAPE) as process, pytest.raises(RuntimeError, match=expected):
        process.decode(GOOD)


@pytest.mark.usefixtures("deadly_decoder")
def test_the_driver_survives_a_deadly_image_while_it_opens_the_data(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "images"))
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"):
        store.put(name, GOOD)
    store.put("b/3.jpg", deadly("segfault"))
    config = TrainConfig(data=store.url, validation_fraction=0.3, image_size=(12, 12), learning_rate=1, batch_size=2)
    assert open_dataset(config, open_store(str(tmp_path / "run"))).mean == pytest.approx((90 / 255,) * 3, abs=0.01)
    with ImageReader(store, SHAPE, isolated=True) as reader:
        assert reader.read(build_manifest(store))[1] == {4: "decoding it ends the process (SIGSEGV)"}


def decoders() -> set[int]:
    return {each.pid for each in psutil.Process().children() if "decode_process" in " ".join(each.cmdline())}


def test_a_reader_decodes_in_one_process_until_it_is_closed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for name in ("a/1.jpg", "b/1.jpg"):
        store.put(name, GOOD)
    before, manifest = decoders(), build_manifest(store)
    with ImageReader(store, SHAPE, isolated=True) as reader:
        reader.read(manifest)
        (first,) = decoders() - before
        reader.read(manifest)
        assert decoders() - before == {first}
    assert decoders() == before


DEADLY = ["green/0417.jpg", "green/0834.jpg", "red/0003.jpg"]


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["local", "ray"])
def test_training_evaluation_and_prediction_go_on_without_images_that_kill_their_readers(
    launch: str, tmp_path: Path
) -> None:
    images = make_images(tmp_path / "images", DEADLY)
    words = [sys.executable, "-m", "tests.helpers.deadly_images", str(images), str(tmp_path / "runs"), launch]
    path = os.pathsep.join([str(DECODER), os.getcwd()])
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))  # Ray tells of the deaths here, too
    results: dict[str, Any] = json.loads(line)
    for cache in ("none", "memory"):
        assert (results[cache]["status"], results[cache]["skipped"]) == ("finished", DEADLY)
        assert results[cache]["num_skipped"] == len(DEADLY)
    assert results["evaluate"]["skipped"] == results["predict"]["errors"] == len(DEADLY)
