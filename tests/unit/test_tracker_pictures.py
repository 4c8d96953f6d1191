"""Trackers with a place for images get those of the last evaluation, once, whatever its document holds."""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

import raytrain
from raytrain.runs.documents import EVALUATION, run_store, write_config, write_json
from raytrain.runs.status import RunStatus, write_status
from raytrain.storage.store import Store
from raytrain.trackers import tracker_threads
from raytrain.trackers.confusion_matrix import confusion_matrix
from raytrain.trackers.lettering import cut_middle, font_families, font_files
from raytrain.trackers.open_trackers import open_trackers
from raytrain.trackers.pictures import contact_sheet, read_pictures
from raytrain.trackers.tracker_threads import Tracking
from tests.helpers.stored_evaluation import HOSTILE_NAME, evaluation, png_url
from tests.helpers.tracked_runs import Recorder, evaluation_row, options, result, snapshot, step_rows, tracked

WORST, BATCH, CONFUSIONS = "validation/most_wrong", "train/last_batch", "validation/confusion_matrix"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return run_store(str(tmp_path), "first")


class Looker(Recorder):
    """A tracker that keeps images, too."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[tuple[str, int, int, list[str]]] = []
        self.complete = threading.Event()

    def log_image(self, key: str, images: Sequence[Any], step: int, caption: list[str]) -> None:
        assert all(image.dtype == np.uint8 and image.shape[2] == 3 for image in images)
        self.images.append((key, len(images), step, caption))
        if key == CONFUSIONS:
            self.complete.set()


def test_the_images_of_the_last_evaluation_are_sent_once(store: Store) -> None:
    write_json(store, EVALUATION, evaluation(step=3))
    looker = Looker()
    for _ in range(2):
        assert tracked(store, [looker], [*step_rows(1, 3), evaluation_row(3)]) == []
    assert [(key, count, step) for key, count, step, _ in looker.images] == [
        (WORST, 2, 3),
        (BATCH, 1, 3),
        (CONFUSIONS, 1, 3),
    ]
    assert looker.images[0][3][0] == "cat\npredicted dog 90%"


def test_the_images_of_an_evaluation_are_sent_while_the_run_trains(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_threads, "GATHER_S", 0.01)
    looker = Looker()
    tracking = Tracking(open_trackers([looker]))
    tracking.begin(options(), store, print)
    write_json(store, EVALUATION, evaluation(step=3))
    tracking.update(snapshot([*step_rows(1, 3), evaluation_row(3)]))
    assert looker.complete.wait(60)
    tracking.finish(result(store))
    assert len(looker.images) == 3


def test_images_that_a_tracker_refused_are_sent_when_the_run_is_over(tmp_path: Path, store: Store) -> None:
    class Refusing(Looker):
        def log_image(self, *_: Any, **__: Any) -> None:
            raise OSError("no place left")

    write_config(store, options())
    write_status(store, RunStatus(status="finished", step=3, num_steps=3))
    write_json(store, EVALUATION, evaluation(step=3))
    [report] = tracked(store, [Refusing()], step_rows(1, 3))
    assert "no place left" in report
    later = type("Refusing", (Looker,), {})()
    raytrain.track("first", [later], storage=str(tmp_path))
    assert len(later.images) == 3


def test_a_run_without_an_evaluation_has_no_images(store: Store) -> None:
    looker = Looker()
    assert tracked(store, [looker], step_rows(1, 3)) == []
    assert looker.images == []


def png_with_a_damaged_chunk() -> str:
    """A PNG whose second chunk of pixels has a name that no chunk has."""
    png = base64.b64decode(png_url(28, 28).partition(",")[2])
    start = png.index(b"IDAT") - 4
    length = int.from_bytes(png[start : start + 4], "big")
    pixels, end = png[start + 8 : start + 8 + length], png[start + 12 + length :]
    first = b"IDAT" + pixels[:5]
    chunk = (5).to_bytes(4, "big") + first + zlib.crc32(first).to_bytes(4, "big")
    damaged = png[:start] + chunk + (length - 5).to_bytes(4, "big") + b"w\xc02\xf0" + pixels[5:] + b"0000" + end
    return f"data:image/png;base64,{base64.b64encode(damaged).decode()}"


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        ({"step": "3"}, []),
        ({"classes": None}, []),
        ({"worst": [{"image": "data:image/png;base64,!!", "label": 0, "prediction": 0}, 7]}, [BATCH, CONFUSIONS]),
        ({"worst": [{"image": png_url(600, 600), "label": 0, "prediction": 1}], "batch": "x"}, [CONFUSIONS]),
        ({"worst": [{"image": "javascript:alert(1)", "label": 0, "prediction": 1}]}, [BATCH, CONFUSIONS]),
        ({"worst": [{"image": png_with_a_damaged_chunk(), "label": 0, "prediction": 1}]}, [BATCH, CONFUSIONS]),
        ({"confusion": [[0, 1]]}, [WORST, BATCH]),
        ({"confusion": [[0, 9, 1]]}, [WORST, BATCH]),
        ({"confusion": [["a", [], {}]]}, [WORST, BATCH]),
        ({"confusion": [[0, 0, None]]}, [WORST, BATCH]),
        ({"confusion": [[0, 1, 10**400]]}, [WORST, BATCH]),
    ],
)
def test_what_is_damaged_is_left_out(damage: dict[str, Any], left: list[str], store: Store) -> None:
    write_json(store, EVALUATION, {**evaluation(step=1), **damage})
    assert [group.key for group in read_pictures(store, after=-1)[1]] == left


@pytest.mark.not_quick  # looks for a font that has its letters
def test_names_of_classes_hold_no_control_characters(store: Store) -> None:
    write_json(store, EVALUATION, {**evaluation(step=1), "classes": [HOSTILE_NAME, "b" * 5000]})
    worst = read_pictures(store, after=-1)[1][0]
    assert all(line.isprintable() for text in worst.captions for line in text.split("\n"))
    assert len(worst.captions[0]) < 300


def test_images_are_drawn_side_by_side_above_their_captions() -> None:
    red, green = (np.full((2, 4, 3), color, np.uint8) for color in ([255, 0, 0], [0, 255, 0]))
    page = contact_sheet([red, green], ["a", "b" * 500])
    assert page.shape == (152 + 30 + 16, 2 * 160 + 8, 3)
    assert page[8 + 76, 8 + 76].tolist() == [255, 0, 0]
    assert page[8 + 76, 8 + 160 + 76].tolist() == [0, 255, 0]
    assert (page[8 + 152 :, :160] < 255).any()


@pytest.mark.parametrize("num_classes", [2, 100])
def test_the_confusion_matrix_has_a_blue_and_an_orange_cell(num_classes: int) -> None:
    picture = confusion_matrix({(0, 0): 5, (1, 0): 5}, [f"class {number}" for number in range(num_classes)])
    assert picture.dtype == np.uint8
    assert 400 <= min(picture.shape[:2]) <= max(picture.shape[:2]) <= 2000
    blue, orange = ((picture[:, :, 2].astype(int) - picture[:, :, 0]) * sign > 60 for sign in (1, -1))
    assert blue.any()
    assert orange.any()


def test_a_long_name_keeps_its_end_where_names_differ() -> None:
    cut = [cut_middle(f"species_of_a_bird_{number:03}", 9) for number in range(3)]
    assert cut == ["spec…_000", "spec…_001", "spec…_002"]
    assert [cut_middle("cat", 3), cut_middle("bird", 2), cut_middle("bird", 1)] == ["cat", "b…", "…"]


def test_letters_that_the_usual_font_lacks_come_from_fonts_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, other = (font_manager.findfont(name) for name in ("DejaVu Sans", "STIXGeneral"))
    rare = min(set(FT2Font(other).get_charmap()) - set(FT2Font(usual).get_charmap()))
    searches: list[None] = []
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: searches.append(None) or [other, __file__])
    assert font_files(["naïve", "кот"]) == [usual]
    assert searches == [], "the fonts of the machine are looked for only if they are needed"
    assert font_files(["naïve", chr(rare)]) == [usual, other]
    assert font_families([chr(rare)]) == ["DejaVu Sans", "STIXGeneral"]
    assert font_files(["\U00013000"]) == [usual], "a letter that no font has"
    pixels = [np.zeros((2, 2, 3), np.uint8)] * 2
    sheets = [contact_sheet(pixels, [text, text]) for text in (chr(rare), "\U00013000")]
    assert (sheets[0] != sheets[1]).any()
