"""The page in a real browser."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from raytrain.demo.demo import render_digits
from raytrain.display.page.server import PageServer
from raytrain.display.page.watched_runs import HomeRuns, StoredRuns, WatchedRuns
from raytrain.errors import shell_command
from raytrain.experiments.find_rate import stored_suggestion
from raytrain.monitor.events import Note, TrainingStarted
from raytrain.runs.documents import (
    CONFIG,
    EVALUATION,
    MACHINE_HISTORY,
    STATUS,
    STOP_REQUEST,
    SUMMARY,
    SUSPICIOUS_LABELS,
    SWEEP,
    UNUSED_OPTIONS,
    read_config,
    read_json,
    run_store,
    write_json,
)
from raytrain.runs.machine_history import MachineHistory, MachineUse
from raytrain.runs.outcome import failure_sentence
from raytrain.runs.status import read_status, write_status
from tests.helpers.browser_pages import expect_later_step, ink
from tests.helpers.dropping_proxy import DroppingProxy
from tests.helpers.snapshots import snapshot, train_result
from tests.helpers.stored_evaluation import HOSTILE_NAME, png_url
from tests.helpers.stored_histories import add_events, append_rows, end_run, evaluation_row, step_row, store_run

Visit = Callable[..., Page]
WRITTEN = """
window.written = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  window.written.push(String(text));
  return fillText.call(this, text, ...place);
};
"""
"""Keeps the texts that are drawn into the charts of a page: the names and the numbers of their axes."""


@contextmanager
def page_of(storage: Path, *names: str, port: int = 0) -> Iterator[PageServer]:
    with StoredRuns(str(storage), names) as runs, PageServer(runs, port) as server:
        yield server


@contextmanager
def training(data: Path, storage: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run with --watch that would take hours, and the address of its page."""
    words = [sys.executable, "-m", "raytrain", "train", "digits", "--data", str(data / "train"), "--watch"]
    words += ["--backend", "local", "--workers", "1"]
    options = ["--test-data", str(data / "test"), "--name", "run", "--storage", str(storage), "--epochs", "100000"]
    command = [*words, *options, "--log-every", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("Watch it at ").strip()
        finally:
            process.kill()


def step_shown(page: Page) -> int:
    found = re.search(r"step ([\d,]+) of", page.locator(".progress-text").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def test_a_run_is_watched_and_stopped_with_a_checkpoint(visit: Visit, tmp_path: Path) -> None:
    data = render_digits(tmp_path / "digits", num_images=300)
    with training(data, tmp_path / "runs") as (process, url):
        first = visit(url)
        expect(first.locator(".pill")).to_have_text("running")
        expect_later_step(first, 1)
        assert ink(first, "Loss") > 0
        step = step_shown(first)
        expect_later_step(first, step + 2)  # it goes on without a reload
        num_workers = int(first.locator(".facts").inner_text().split(" worker")[0])
        expect(first.locator(".machines tbody tr")).to_have_count(num_workers)
        second = visit(url)
        expect_later_step(second, step)  # a page that is opened late has it all
        first.reload()
        expect_later_step(first, step)
        first.get_by_role("button", name="Stop", exact=True).click()
        first.get_by_role("button", name="Go on training").click()
        expect(first.locator(".stop-panel")).to_be_hidden()
        first.get_by_role("button", name="Stop", exact=True).click()
        first.get_by_role("button", name="Stop the run").click()
        for viewer in (first, second):
            expect(viewer.locator(".banner")).to_contain_text("Stopped with a checkpoint")
            expect(viewer.locator(".banner")).to_contain_text("/runs/run/checkpoints/step-")
            again = shell_command("watch", "run", storage=str(tmp_path / "runs"))
            expect(viewer.locator(".connection")).to_have_text(f"the page has ended; again with: {again}")
            expect(viewer.locator(".banner .resume")).to_contain_text("--name run", timeout=10_000)
        expect(first.locator(".stop-steps li[data-state=done]")).to_have_count(5)
        assert process.wait(60) == 0
    store = tmp_path / "runs" / "run"
    assert f"step-{step_shown(first):09d}.pt" in {path.name for path in (store / "checkpoints").iterdir()}


def test_a_run_of_another_process_is_shown_from_its_documents_and_stopped(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(step, loss=1 / step) for step in range(1, 50)])
    add_events(store, TrainingStarted(2))
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        expect(page.locator(".events")).to_contain_text("training on 2 workers")
        expect(page.locator(".config")).to_contain_text("raytrain.models:digits")
        append_rows(tmp_path / "run", [step_row(50, loss=0.5), evaluation_row(50, accuracy=0.875, loss=0.25)])
        expect(page.locator(".tiles")).to_contain_text("87.5 %")
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Stop the run").click()
        expect(page.locator(".pill")).to_have_text("stopping")
        assert read_json(store, STOP_REQUEST)["kind"] == "page"
        end_run(store, "stopped", 51, "runs/run/checkpoints/step-000000051.pt", best=0.9375)
        expect(page.locator(".banner")).to_contain_text("step-000000051.pt")
        expect(page.locator(".tiles")).to_contain_text("Best validation accuracy93.8 %")  # better than the last, 87.5 %
        resume = shell_command("train", "--name", "run", storage=str(tmp_path)) + " --resume"
        expect(page.locator(".banner .resume")).to_have_text(f"Resume with: {resume} copy")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="copy").click()
        expect(page.get_by_role("button", name="copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == resume


def test_a_run_that_is_over_shows_the_best_value_of_the_metric_that_has_chosen_its_checkpoint(
    visit: Visit, tmp_path: Path
) -> None:
    rows = [evaluation_row(step, accuracy=0.5, loss=loss) for step, loss in ((1, 1.25), (2, 2.0))]
    store = store_run(tmp_path, "run", rows, best="loss")
    result = train_result(name="run", run_dir=store.url, best_metric="loss", best_value=1.25)
    write_json(store, SUMMARY, result.summary())
    write_status(store, replace(read_status(store), status="finished"))
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        expect(page.locator(".config")).to_contain_text("best")
        expect(page.locator(".tiles")).to_contain_text("Best validation loss1.25", timeout=30_000)


def test_a_run_that_was_stopped_and_resumes_can_be_stopped_again(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(50)])
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Stop the run").click()
        expect(page.locator(".pill")).to_have_text("stopping")
        end_run(store, "stopped", 51, None)
        expect(page.locator(".pill")).to_have_text("stopped")
        store.delete(STOP_REQUEST)
        write_status(store, replace(read_status(store), status="running"))
        expect(page.locator(".pill")).to_have_text("running")
        expect(page.locator(".stop-panel")).to_be_hidden()
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_role("button", name="Stop the run")).to_be_visible()


def test_the_page_of_a_run_that_is_not_there_yet_shows_it_once_it_is(visit: Visit, tmp_path: Path) -> None:
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(f"{server.url}&run=late")
        expect(page.locator("main")).to_contain_text("There is no run 'late'")
        expect(page.locator("main")).to_contain_text("This page shows it once it is there.")
        expect(page.locator(".connection")).to_have_text("waiting …")
        store_run(tmp_path, "late", [step_row(3, loss=1.0)])
        expect(page.locator(".progress-text")).to_contain_text("step 3 of")
        expect(page.locator(".connection")).to_have_text("live")
        expect(page.locator("main")).not_to_contain_text("There is no run")


def test_a_run_that_is_deleted_and_trained_anew_is_shown_with_its_own_events_alone(
    visit: Visit, tmp_path: Path
) -> None:
    events = TrainingStarted(2), Note("of the first"), Note("also of the first")
    add_events(store_run(tmp_path, "run", [step_row(1, loss=1.0)]), *events)
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        shown = page.locator(".events li")
        expect(shown).to_have_count(3)
        shutil.rmtree(tmp_path / "run")
        add_events(store_run(tmp_path, "run", [step_row(2, loss=1.0)]), TrainingStarted(1), Note("of the second"))
        expect(shown).to_have_text([re.compile("of the second$"), re.compile("training on 1 worker$")])


def test_a_trial_that_has_not_started_is_waited_for(visit: Visit, tmp_path: Path) -> None:
    with page_of(tmp_path, "rates-01") as server:
        page = visit(server.url)
        expect(page.locator("main")).to_have_text("waiting for rates-01 …")
        store_run(tmp_path, "rates-01", [step_row(3, loss=1.0)])
        expect(page.locator(".progress-text")).to_contain_text("step 3 of")
        expect(page.locator("main")).not_to_contain_text("waiting for")


def test_a_page_that_loses_its_connection_comes_back_by_itself(visit: Visit, tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(1, loss=1.0)])
    with page_of(tmp_path, "run") as server, DroppingProxy(urlsplit(server.url).port or 0) as proxy:
        page = visit(f"http://127.0.0.1:{proxy.port}/#{urlsplit(server.url).fragment}")
        expect(page.locator(".progress-text")).to_contain_text("step 1 of")
        proxy.drop()
        append_rows(tmp_path / "run", [step_row(2, loss=0.5)])
        expect(page.locator(".progress-text")).to_contain_text("step 2 of")
        expect(page.locator(".connection")).to_have_text("live")


@pytest.mark.parametrize("names", [("run",), ()])
def test_a_page_that_has_ended_says_how_to_see_it_again(visit: Visit, tmp_path: Path, names: tuple[str, ...]) -> None:
    store_run(tmp_path, "run", [step_row(1)])
    with StoredRuns(str(tmp_path), names) if names else HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        expect(page.locator("article")).to_be_visible()
    again = shell_command("watch", *names, storage=str(tmp_path))
    expect(page.locator(".connection")).to_have_text(f"the page has ended; again with: {again}")


def test_a_page_says_what_a_run_waits_for_that_starts(visit: Visit, tmp_path: Path) -> None:
    runs = WatchedRuns(str(tmp_path), [])
    with PageServer(runs, 0) as server:
        page = visit(server.url)
        for phase in ("listing the images …", "starting the workers …"):
            runs.show_phase(phase)
            expect(page.locator("main")).to_have_text(phase)
        runs.update(snapshot([], status="starting"))
        expect(page.locator(".progress-text")).to_contain_text("waiting for the workers … · 0 %")
        assert "starting the workers" not in page.content()
        for empty in (".controls", "section:has(.events)"):  # there is nothing to smooth, and nothing has happened
            expect(page.locator(empty)).to_be_hidden()
        runs.update(snapshot([step_row(5, loss=1.0)], status="starting"))  # of a run that resumes
        expect(page.locator(".progress-text")).to_have_text("waiting for the workers …")
        expect(page.locator(".controls")).to_be_visible()


def test_a_run_whose_rate_rises_is_drawn_over_the_rate(visit: Visit, tmp_path: Path) -> None:
    rows = [replace(step_row(step, loss=3.0 - step / 20), learning_rate=1e-6 * 2.0**step) for step in range(1, 21)]
    store_run(tmp_path, "rate", rows, schedule="rising")
    with page_of(tmp_path, "rate") as server:
        page = visit(server.url)
        expect(page.get_by_role("button", name="over the learning rate")).to_be_visible()
        assert ink(page, "Loss") > 0
        page.locator(".u-over").first.hover(position={"x": 3, "y": 3})
        expect(page.locator(".where").first).to_have_text("learning rate 0.000002")
        page.get_by_role("button", name="over the learning rate").click()
        expect(page.get_by_role("button", name="over steps")).to_be_visible()
        expect(page.locator(".tiles")).to_contain_text("Suggested rate…")  # it is known at the end
        end_run(run_store(str(tmp_path), "rate"), "finished", 20, None)
        expect(page.locator(".pill")).to_have_text("finished")
        expect(page.locator(".banner")).to_contain_text("No learning rate is suggested: the loss still falls")


def test_a_run_that_looked_for_a_rate_shows_the_one_that_it_suggests(visit: Visit, tmp_path: Path) -> None:
    losses = [*(2.5 - step / 20 for step in range(30)), *(1.0 + step / 4 for step in range(10))]
    rows = [replace(step_row(step, loss=loss), learning_rate=1e-5 * 1.5**step) for step, loss in enumerate(losses, 1)]
    end_run(store_run(tmp_path, "rate", rows, schedule="rising"), "finished", 40, None)
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        expect(page.locator(".home tbody tr")).to_contain_text("looks for a learning rate")
        page.get_by_role("link", name="rate", exact=True).click()
        expect(page.locator(".pill")).to_have_text("finished")
        suggestion = f"{stored_suggestion(rows)[0]:g}"
        expect(page.locator(".banner")).to_contain_text(f"Suggested learning rate: {suggestion}. The loss, averaged")
        expect(page.locator(".tiles")).to_contain_text(f"Suggested rate{suggestion}")
        expect(page.locator("figure.chart", has_text="Loss")).to_contain_text(f"suggested {suggestion}")
        assert "Validation accuracy" not in page.locator(".tiles").inner_text()


def test_the_page_of_a_run_begins_with_its_model_epochs_and_rate(visit: Visit, tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(1, loss=1.0)], learning_rate=0.0003, tag=("good",), note="a try")
    with page_of(tmp_path, "run") as server:
        page = visit(server.url, viewport={"width": 390, "height": 800})
        options = page.locator(".options")
        for known in ("Modeldigits", "Epochs20", "Rate0.0003", "Tagsgood", "Notea try", "Last activetoday"):
            expect(options).to_contain_text(known)
        box = options.bounding_box()
        assert box is not None and box["y"] + box["height"] < 400, "seen without scrolling"


def test_a_wrong_token_shows_nothing_but_what_to_do(visit: Visit, tmp_path: Path) -> None:
    store_run(tmp_path, "secret-run", [step_row(1, loss=1.0)])
    with page_of(tmp_path, "secret-run") as server:
        page = visit(server.url[:-1])
        expect(page.locator(".banner")).to_contain_text("lacks the right token")
        assert "secret-run" not in page.content()


def test_text_from_outside_stays_text(visit: Visit, tmp_path: Path) -> None:
    store = store_run(
        tmp_path, "run", [step_row(1, loss=1.0, **{HOSTILE_NAME: 1e308}), step_row(2, **{HOSTILE_NAME: None})]
    )
    add_events(store, Note(HOSTILE_NAME))
    pixel = png_url(1, 1)
    worst = [
        {"image": image, "label": 0, "prediction": 1, "key": HOSTILE_NAME} for image in (pixel, "javascript:alert(1)")
    ]
    write_json(
        store,
        EVALUATION,
        {"step": 1, "classes": [HOSTILE_NAME, "b"], "worst": worst, "confusion": [[0, 1, 3], [1, 1, 2]]},
    )
    append_rows(tmp_path / "run", [evaluation_row(2, accuracy=0.5, loss=1e300)])
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        expect(page.locator(".events")).to_contain_text("<img src=x onerror=alert(1)>")
        expect(page.locator(".gallery img")).to_have_count(1)
        assert page.locator("img[src=x]").count() == 0
        text = page.locator("body").inner_text()
        assert "\x1b" not in text and "\u202e" not in text
        assert page.get_by_text("taken for").inner_text().count("<img src=x") == 1


def test_images_whose_labels_may_be_wrong_are_shown_with_both_classes(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(1, loss=1.0)])
    good = {"image": png_url(1, 1), "key": HOSTILE_NAME, "label": "cat", "suggested": "dog", "margin": -1.5, "draws": 2}
    write_json(store, SUSPICIOUS_LABELS, {"step": 1, "labels": [None, 5, {**good, "image": "javascript:1"}, good]})
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        expect(page.get_by_text("Labels that may be wrong")).to_be_visible()
        expect(page.locator(".evaluation .about code")).to_have_text("raytrain look")
        expect(page.locator(".gallery figure")).to_have_count(1)
        expect(page.locator(".gallery figcaption")).to_have_text("cator dog?")
        assert "margin -1.5" in (page.locator(".gallery figure").get_attribute("title") or "")


def test_long_names_of_classes_are_seen_with_their_ends(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(1, loss=1.0)])
    names = [f"{'a_long_name_of_a_class_' * 3}{number:03}" for number in range(2)]
    worst = [{"image": png_url(1, 1), "label": 0, "prediction": 1, "probability": 0.5}]
    write_json(store, EVALUATION, {"step": 1, "classes": names, "worst": worst, "confusion": [[0, 1, 3]]})
    append_rows(tmp_path / "run", [evaluation_row(1, accuracy=0.5)])
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        expect(page.locator(".gallery .cut, .matrix .cut")).to_have_count(6)
        for cell in page.locator(".gallery .cut, .matrix .cut").all():
            box, end = cell.bounding_box(), cell.locator("span").last.bounding_box()
            assert box and end and end["width"] > 0 < end["height"]
            assert max(box["width"], box["height"]) < 160
            assert end["x"] + end["width"] <= box["x"] + box["width"] + 1
        # Chinese letters lie on their sides, too: the heading is turned, and upright ones stood on their heads.
        expect(page.locator(".matrix th[scope=col] .cut").first).to_have_css("text-orientation", "sideways")


def test_a_count_stands_behind_names_that_are_written_from_right_to_left(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(1, loss=1.0)])
    names = ["\u05d7\u05ea\u05d5\u05dc", "\u05db\u05dc\u05d1"]  # cat and dog, in Hebrew
    write_json(store, EVALUATION, {"step": 1, "classes": names, "confusion": [[0, 1, 3]]})
    append_rows(tmp_path / "run", [evaluation_row(1, accuracy=0.5)])
    with page_of(tmp_path, "run") as server:
        line = visit(server.url).locator(".confusions li")
        expect(line).to_contain_text(": 3 ×")
        ends = """item => {
            const count = document.createRange();
            count.selectNode(item.lastChild);
            return [...item.querySelectorAll("b"), count].map(part => part.getBoundingClientRect().right);
        }"""
        label, prediction, count = line.evaluate(ends)
        assert label < prediction < count


def test_a_cell_of_a_matrix_of_many_classes_says_what_it_is(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(1, loss=1.0)])
    names = [f"class {number}" for number in range(100)]
    write_json(store, EVALUATION, {"step": 1, "classes": names, "confusion": [[7, 31, 3]]})
    with page_of(tmp_path, "run") as server:
        matrix = visit(server.url).locator("canvas.matrix")
        side = matrix.evaluate("canvas => canvas.clientWidth / 100")
        matrix.hover(position={"x": 31.5 * side, "y": 7.5 * side})
        expect(matrix).to_have_attribute("title", "class 7 taken for class 31: 3")
        expect(matrix).to_have_accessible_name("confusion matrix of 100 classes")


def test_what_is_damaged_in_an_evaluation_hides_nothing_else(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(1, loss=1.0)])
    good = {"image": png_url(1, 1), "label": 0, "prediction": HOSTILE_NAME, "probability": "high"}
    cells = [5, None, [0, "x", 1], [0, 99, 1], [-1, 0, 1], {"0": 1}, [0, 1, 3], [1, 1, 9]]
    document = {"step": HOSTILE_NAME, "classes": [HOSTILE_NAME, None], "worst": [None, 5, good], "batch": "many"}
    write_json(store, EVALUATION, {**document, "confusion": cells})
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        expect(page.locator(".gallery img")).to_have_count(1)
        expect(page.locator("table.matrix td[title]")).to_have_count(4)
        expect(page.locator(".confusions li")).to_have_count(1)
        expect(page.locator("table.matrix th").first).to_contain_text("<img src=x onerror=alert(1)>")
        assert page.locator("img[src=x]").count() == 0


def test_a_failed_run_with_a_loop_of_its_own_shows_one_command_and_the_options_that_it_uses(
    visit: Visit, tmp_path: Path
) -> None:
    store = store_run(tmp_path, "run", [step_row(5, loss=1.0)])
    write_json(store, UNUSED_OPTIONS, {"options": ["model", "learning_rate", "optimizer"]})
    write_json(store, CONFIG, {**read_json(store, CONFIG), "loop": "a/way/to/my_loop.py:train"})
    for has_checkpoint in (True, False):
        error = failure_sentence(
            read_config(store), "its loop failed after step 5: boom", has_checkpoint=has_checkpoint
        )
        end_run(store, "failed", 5, None)
        write_json(store, SUMMARY, {**read_json(store, SUMMARY), "error": f"{error}."})
        with page_of(tmp_path, "run") as server:
            page = visit(server.url)
            expect(page.locator(".banner .resume")).to_contain_text("raytrain train --name run")
            expect(page.locator(".banner")).to_contain_text("Run 'run' failed: its loop failed after step 5: boom.")
            assert page.locator(".banner").inner_text().count("raytrain train") == 1
            expect(page.locator(".options")).to_contain_text("Epochs")
            for option in ("Model", "Rate", "Optimizer"):
                expect(page.locator(".options")).not_to_contain_text(option)
            expect(page.locator(".options")).to_contain_text("Loop my_loop.py:train", use_inner_text=True)


def test_a_run_without_a_word_is_drawn_at_no_word_of_another(visit: Visit, tmp_path: Path) -> None:
    for number, loop in enumerate(("loops.py:train", None, "a/long/way/to/" * 20 + "my_loop.py:train")):
        store = store_run(tmp_path, f"loops-{number}", [evaluation_row(1, accuracy=0.5)], status="finished")
        write_json(store, CONFIG, {**read_json(store, CONFIG), "loop": loop})
    with page_of(tmp_path, "loops-0", "loops-1", "loops-2") as server:
        ticks = visit(server.url).locator(".coordinates .tick")
        expect(ticks).to_contain_text(["…", "loops.py:train", "–", "50.0 %"])
        expect(ticks.first).to_contain_text("/my_loop.py:train")


def test_options_and_results_of_a_strangers_sweep_stay_text(visit: Visit, tmp_path: Path) -> None:
    for number, value in enumerate((1e-300, 1e300, math.nan)):
        rows = [step_row(1, loss=value), evaluation_row(1, accuracy=value)]
        store = store_run(tmp_path, f"rates-{number}", rows, status="finished")
        options = {"model": f"{HOSTILE_NAME}{number}", "learning_rate": [0.1, 1e-300, 1e300][number]}
        write_json(store, CONFIG, {**read_json(store, CONFIG), **options})
    with page_of(tmp_path, "rates-0", "rates-1", "rates-2") as server:
        page = visit(server.url)
        expect(page.locator(".coordinates path.line")).to_have_count(3)
        expect(page.locator(".coordinates")).to_contain_text("<img src=x onerror=alert(1)>")
        expect(page.locator(".runs tbody")).to_contain_text("<img src=x onerror=alert(1)>")
        page.get_by_role("button", name="rates-2").click()
        expect(page.locator("article.run:visible .config")).to_contain_text("<img src=x onerror=alert(1)>")
        assert page.locator("img").count() == 0
        text = page.locator("body").inner_text()
        assert "\x1b" not in text and "\u202e" not in text


def test_a_long_run_is_zoomed_into(visit: Visit, tmp_path: Path) -> None:
    rows = [step_row(step, loss=100.0 if step == 54_321 else 1.0) for step in range(1, 100_001)]
    end_run(store_run(tmp_path, "run", rows, status="finished"), "finished", 100_000, "checkpoint")
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        expect(page.locator(".banner")).to_contain_text("Finished after step 100,000")
        expect(page.locator(".options")).to_be_visible()  # which moves the charts down
        chart = page.locator("figure.chart", has=page.locator("h3:text-is('Loss')"))
        expect(chart.locator(".values")).to_contain_text("1")  # the curve is drawn, so the chart is not replaced later
        overlay = chart.locator(".u-over")
        box = overlay.bounding_box()
        assert box is not None
        middle = box["width"] * 0.54321
        with page.expect_response(lambda response: "/api/curves" in response.url) as closer:
            overlay.hover(position={"x": middle - 15, "y": 50})  # waits until the page no longer moves
            page.mouse.down()
            overlay.hover(position={"x": middle + 15, "y": 60})
            page.mouse.up()
        assert max(closer.value.json()["step"]["metrics"]["loss"].get("high", [])) == 100.0
        assert closer.value.json()["step"]["width"] < 16
        expect(page.get_by_role("button", name="show all")).to_be_visible()
        page.get_by_role("button", name="show all").click()
        expect(page.get_by_role("button", name="show all")).to_be_hidden()
        page.get_by_role("button", name="log").first.focus()
        ranges: list[list[int]] = []  # in hundredths of the run: half of it, a quarter, and that moved to the left
        for key in ("+", "+", "ArrowLeft"):
            with page.expect_request(lambda request: "/api/curves" in request.url) as asked:
                page.keyboard.press(key)
            ranges.append([round(int(end) / 1000) for end in re.findall(r"(?:first|last)=(\d+)", asked.value.url)])
        assert ranges == [[25, 75], [38, 63], [31, 56]]
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="show all")).to_be_hidden()


def test_the_one_loss_before_a_divergence_is_a_point(visit: Visit, tmp_path: Path) -> None:
    rows = [step_row(1, loss=0.7), step_row(2, loss=math.nan), step_row(3, loss=math.nan)]
    end_run(store_run(tmp_path, "run", rows, status="failed"), "failed", 3, None)
    with page_of(tmp_path, "run") as server:
        page = visit(server.url, color_scheme="light")
        expect(page.locator(".banner")).to_contain_text("Failed after step 3")
        assert ink(page, "Loss", rgb=(14, 138, 138)) > 10


def test_a_smoothed_constant_is_a_level_line(visit: Visit, tmp_path: Path) -> None:
    rows = [replace(step_row(step, loss=1.0), images_per_s=300.0) for step in range(1, 401)]
    end_run(store_run(tmp_path, "run", rows, status="finished"), "finished", 400, None)
    with page_of(tmp_path, "run") as server:
        page = visit(server.url, color_scheme="light")
        chart = page.locator("figure.chart", has=page.locator("h3:text-is('Images per second')"))
        expect(chart.locator(".values")).to_contain_text("300")
        assert ink(page, "Images per second", rgb=(14, 138, 138)) > 100
        heights = chart.locator("canvas").evaluate(
            "(canvas) => { const rows = new Set(), { width, height } = canvas,"
            " data = canvas.getContext('2d').getImageData(0, 0, width, height).data;"
            " for (let i = 0; i < data.length; i += 4)"
            " if (data[i] === 14 && data[i + 1] === 138) rows.add(Math.floor(i / 4 / width)); return rows.size; }"
        )
        assert heights < 5  # rounding would fill the chart


def test_runs_side_by_side(visit: Visit, tmp_path: Path) -> None:
    for number, rate in enumerate((0.01234, 0.1, 1.0)):
        speeds = (5.0, *(300.0,) * 17, 900.0)  # the first and the last do not count
        rows = [replace(step_row(step, loss=rate / step), images_per_s=speeds[step - 1]) for step in range(1, 20)]
        rows.append(evaluation_row(20, accuracy=0.9 - rate / 2))
        described = {"price": (str(number + 1),), "note": f"run {number}", "open_options": ("epochs",) * number}
        store_run(tmp_path, f"rates-{number}", rows, status="finished", learning_rate=rate, **described)
    with page_of(tmp_path, "rates-0", "rates-1", "rates-2") as server:
        page = visit(server.url)
        expect(page.locator(".runs tbody tr")).to_have_count(3)
        headings = ["Run", "Status", "Progress", "learning-rate", "Best accuracy", "Images/s"]
        expect(page.locator(".runs thead th")).to_have_text(headings)
        expect(page.locator(".runs tbody tr").first).to_contain_text("rates-0")  # the best
        expect(page.locator(".comparison .facts")).to_contain_text("best rates-0, accuracy 89.4 %")
        rates = page.locator(".runs tbody td[data-title=learning-rate]")
        expect(rates).to_have_text(["0.01234", "0.1", "1"])  # as in the terminal
        expect(page.locator(".runs tbody td[data-title='Images/s']")).to_have_text(["300"] * 3)
        for chart in page.locator(".comparison .charts figure.chart").all():  # in their order, with the same colours
            expect(chart.locator(".label")).to_have_text(["rates-0", "rates-1", "rates-2"])
        table, coordinates = (page.locator(f".comparison {part}").bounding_box() for part in (".runs", ".coordinates"))
        assert table is not None and coordinates is not None and table["y"] < coordinates["y"]
        expect(page.locator(".coordinates path.line")).to_have_count(3)
        expect(page.locator("article.run:visible")).to_have_count(0)
        page.get_by_role("button", name="rates-1").click()
        expect(page.locator("article.run:visible h1")).to_have_text("rates-1")


def test_the_keyboard_stays_at_a_run_of_a_comparison_that_trains(visit: Visit, tmp_path: Path) -> None:
    for name in ("rates-00", "rates-01"):
        store_run(tmp_path, name, [step_row(1, loss=1.0)])
    with page_of(tmp_path, "rates-00", "rates-01") as server:
        page = visit(server.url)
        page.get_by_role("button", name="rates-01").focus()
        append_rows(tmp_path / "rates-01", [evaluation_row(2, accuracy=0.875)])
        expect(page.locator("article.comparison tbody")).to_contain_text("87.5 %")
        expect(page.get_by_role("button", name="rates-01")).to_be_focused(timeout=5_000)
        expect(page.get_by_role("progressbar", name="progress of rates-01")).to_be_visible()


def test_the_cost_of_a_sweep_is_shown_beside_that_of_its_trials(visit: Visit, tmp_path: Path) -> None:
    costs = {"rates-00": 1.5, "rates-01": 0.25, "rates": 1234.5}
    for name, dollars in costs.items():
        store = store_run(tmp_path, name, [step_row(1, loss=1.0)], price=("3",))
        write_status(store, replace(read_status(store), dollars=dollars))
    write_json(store, SWEEP, {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]})
    with page_of(tmp_path, "rates-00", "rates-01") as server:
        page = visit(server.url)
        expect(page.locator(".comparison .facts")).to_contain_text("$1,234.50 for the whole sweep")
        expect(page.locator(".runs tbody td[data-title=Cost]")).to_have_text(["$1.50", "$0.2500"])
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url, viewport={"width": 1280, "height": 700})
        expect(page.locator(".home tbody tr .cost, .home tbody tr td.cost")).to_have_text(["$1,234.50"])


def test_each_chart_has_a_heading_and_an_axis_with_its_name_and_whole_steps(visit: Visit, tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(1, loss=2.0), step_row(3, loss=1.0), evaluation_row(3, accuracy=0.5)])
    with page_of(tmp_path, "run") as server:
        page = visit("about:blank")
        page.add_init_script(WRITTEN)
        page.goto(server.url)
        assert ink(page, "Loss") > 0
        for label in ("step", "time"):
            page.wait_for_function("label => window.written.includes(label)", arg=label)
            expect(page.locator("figure.chart:visible h3")).to_have_text(["Loss", "Accuracy", "Learning rate"])
            written = page.evaluate("window.written")
            assert written.count(label) >= 3, "below each chart"
            if label == "step":  # there is no half of one
                assert "2" in written and "1.5" not in written
                page.evaluate("window.written = []")
                page.get_by_role("button", name="over steps").click()


def test_the_numbers_of_an_axis_differ_also_if_its_values_hardly_do(visit: Visit, tmp_path: Path) -> None:
    rows = [step_row(1, loss=2.0), evaluation_row(1, accuracy=0.9941), evaluation_row(2, accuracy=0.9945)]
    store_run(tmp_path, "run", rows)
    with page_of(tmp_path, "run") as server:
        page = visit("about:blank")
        page.add_init_script(WRITTEN)
        page.goto(server.url)
        page.wait_for_function("window.written.some((text) => text.startsWith('99.4'))")
        ticks = [text for text in page.evaluate("window.written") if text.startswith("99.4")]
        assert {"99.42 %", "99.43 %"} <= set(ticks) and "99.4 %" not in ticks


def test_the_numbers_of_an_axis_are_whole_however_large_they_are(visit: Visit, tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(step, loss=1_000_000.0 + step) for step in range(1, 4)])
    with page_of(tmp_path, "run") as server:
        chart = visit(server.url).locator("figure.chart", has_text="Loss").first
        expect(chart.locator(".u-over")).to_be_visible()
        assert chart.locator(".u-over").evaluate("over => over.offsetLeft") >= 70  # room for 1,000,001.0


def test_a_smoothed_curve_has_the_measured_value_beside_its_name(visit: Visit, tmp_path: Path) -> None:
    for name in ("rates-00", "rates-01"):
        store_run(tmp_path, name, [*(step_row(step, loss=8.0) for step in range(1, 40)), step_row(40, loss=0.5)])
    with page_of(tmp_path, "rates-00") as server:
        page = visit(server.url)
        expect(page.locator("figure.chart", has_text="Loss").first.locator("b").first).to_have_text("0.5")
    with page_of(tmp_path, "rates-00", "rates-01") as server:
        page = visit(server.url)
        expect(page.locator("figure.chart", has_text="Training loss").locator("b")).to_have_text(["0.5", "0.5"])


def test_a_loss_that_has_diverged_has_no_last_value(visit: Visit, tmp_path: Path) -> None:
    for name in ("rates-00", "rates-01"):
        losses = (8.0, 4.0, math.nan if name == "rates-01" else 2.0)
        store_run(tmp_path, name, [step_row(step, loss=loss) for step, loss in enumerate(losses, start=1)])
    with page_of(tmp_path, "rates-01") as server:
        loss = visit(server.url).locator("figure.chart", has_text="Loss").first.locator("b")
        expect(loss).to_have_text("–")
    with page_of(tmp_path, "rates-00", "rates-01") as server:
        losses = visit(server.url).locator("figure.chart", has_text="Training loss").locator("b")
        expect(losses).to_have_text(["2", "–"])


def test_a_step_whose_loss_is_no_number_has_no_value_under_the_cursor(visit: Visit, tmp_path: Path) -> None:
    rows = [step_row(step, loss=None if step in (5, 6, 7) else 0.25) for step in range(1, 12)]
    store_run(tmp_path, "run", [*rows, evaluation_row(4, loss=0.75)])
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        values = page.locator("figure", has_text="Loss").first.locator(".values")
        expect(values).to_have_text("train0.25validation0.75")
        page.locator("figure", has_text="Loss").first.locator(".u-over").hover()  # its middle, which is step 6
        expect(values).to_have_text("step 6train–validation0.75")  # the last evaluation before that step


@pytest.mark.parametrize(("names", "num_charts"), [(["run"], 3), (["run", "other"], 2)])
def test_all_charts_of_a_page_have_the_same_steps(
    visit: Visit, tmp_path: Path, names: list[str], num_charts: int
) -> None:
    steps = [step_row(step, loss=1 / step) for step in range(1, 41)]
    for name in names:
        store_run(tmp_path, name, [*steps, *(evaluation_row(step, accuracy=0.5) for step in (39, 40))])
    with page_of(tmp_path, *names) as server:
        page = visit("about:blank")
        page.add_init_script(WRITTEN)
        page.goto(server.url)
        page.wait_for_function(f"window.written.filter((text) => text === '10').length >= {num_charts}", timeout=60_000)
        assert "39" not in page.evaluate("window.written"), "the axis of the accuracy begins with the first step, too"


def test_a_value_that_stays_the_same_is_drawn_on_a_logarithmic_scale(visit: Visit, tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(step, loss=100.0) for step in range(1, 60)])  # smoothed, all but equal
    with page_of(tmp_path, "run") as server:
        page = visit("about:blank")
        page.add_init_script(WRITTEN)
        page.goto(server.url)
        page.get_by_role("button", name="log", exact=True).first.click()
        page.wait_for_function("window.written.includes('1,000')", timeout=60_000)  # a power of ten


def test_the_home_lists_all_runs_and_leads_to_each(visit: Visit, tmp_path: Path) -> None:
    rows = [
        row for step in (1, 2, 3) for row in (step_row(step, loss=1 / step), evaluation_row(step, accuracy=step / 9))
    ]
    for name in ("first", "a_second_run_with_a_name_of_many_letters", "rates-00", "rates-01"):
        store_run(
            tmp_path, name, rows if name != "rates-01" else [step_row(1), evaluation_row(1, accuracy=0.9), *rows[2:4]]
        )
    write_json(store_run(tmp_path, "rates", []), SWEEP, {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]})
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url, viewport={"width": 1280, "height": 700})
        rows_shown = page.locator(".home tbody tr")
        expect(rows_shown).to_have_count(3)  # the sweep is one
        expect(page.locator(".home svg.sparkline polyline")).to_have_count(3)
        expect(page.locator("img")).to_have_count(0)
        expect(page.locator(".home")).to_contain_text(
            "2 runs, best rates-01"
        )  # at its best evaluation, not at its last
        page.get_by_role("searchbox").fill("rates-0")
        expect(rows_shown).to_have_count(2)
        expect(page.locator(".home svg.sparkline polyline")).to_have_count(2)
        page.get_by_role("searchbox").fill("nothing")
        expect(rows_shown).to_have_count(0)
        page.get_by_role("searchbox").fill("first")
        page.get_by_role("link", name="first").click()
        expect(page.locator("article.run h1")).to_have_text("first")
        assert ink(page, "Accuracy") > 0
        page.get_by_role("link", name="All runs").click()
        page.get_by_role("link", name="rates", exact=True).click()
        expect(page.locator("article.comparison tbody tr")).to_have_count(2)
        expect(page.locator("article.comparison h1")).to_have_text("rates")
        facts = page.locator("article.comparison .facts")
        expect(facts).to_have_text("2 runs · running · best rates-01, accuracy 90.0 %")


def test_the_keyboard_stays_at_its_place_in_the_home_while_runs_train(visit: Visit, tmp_path: Path) -> None:
    for name in ("run", "other"):
        store_run(tmp_path, name, [step_row(1, loss=1.0)])
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        box = page.get_by_role("checkbox", name="compare run")
        box.focus()
        store_run(tmp_path, "third", [step_row(1, loss=1.0)])
        expect(page.locator(".home tbody tr")).to_have_count(3)
        expect(box).to_be_focused(timeout=5_000)


def test_the_best_value_in_the_home_is_that_of_all_evaluations(visit: Visit, tmp_path: Path) -> None:
    rows = [evaluation_row(step, loss=0.1 + step / 100) for step in range(1, 301)]
    store_run(tmp_path, "overfits", rows, best="loss")
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        expect(visit(server.url).locator(".home td.accuracy")).to_have_text("0.11")


def test_the_home_counts_the_one_trial_of_a_sweep_that_has_begun(visit: Visit, tmp_path: Path) -> None:
    for name in ("rates", "rates-00"):
        store_run(tmp_path, name, [])
    write_json(run_store(str(tmp_path), "rates"), SWEEP, {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]})
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        expect(visit(server.url).locator(".home tbody .about")).to_have_text("1 run")


def test_the_home_shows_the_state_and_the_time_of_a_sweep_and_not_of_its_best_trial(
    visit: Visit, tmp_path: Path
) -> None:
    sweep = store_run(tmp_path, "rates", [], status="stopped")
    write_json(sweep, SWEEP, {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]})
    write_json(sweep, SUMMARY, {"seconds": 372.9})
    # The home begins with the run that was active last: rates-00, or, within a second, the first by its name.
    for name, accuracy, status, seconds in (("rates-01", 0.5, "stopped", 286.0), ("rates-00", 0.9, "finished", 81.9)):
        store = store_run(tmp_path, name, [evaluation_row(1, accuracy=accuracy)], status=status)
        write_json(store, SUMMARY, {"best_value": accuracy, "seconds": seconds})
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        line = page.locator(".home tbody tr")
        expect(line.locator(".pill")).to_have_text("stopped")
        expect(line.locator("td.time")).to_have_text("6 min 12 s")  # as the terminal cuts it off
        expect(line.locator("td.accuracy")).to_have_text("90.0 %")
        line.get_by_role("button").click()
        expect(page.locator(".home td.time")).to_have_text(["6 min 12 s", "1 min 21 s", "4 min 46 s"])


def test_the_home_shows_all_runs_at_once_on_every_screen(visit: Visit, tmp_path: Path) -> None:
    for number in range(17):
        name = f"run-with-a-name-of-many-words-{number:02d}"
        store_run(tmp_path, name, [evaluation_row(1, accuracy=0.5 + number / 100)], learning_rate=0.03 * (number + 1))
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        lines = page.locator(".home tbody tr")
        for width in (1440, 1024, 390):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme="dark" if width < 400 else "light")
            expect(lines).to_have_count(17)
            for known in ("running", "66.0 %", "digits", "0.51", "today"):
                expect(lines.filter(has_text="words-16")).to_contain_text(known)

            # Nothing is cut off: neither in a box of its own, nor at the side. A name is not broken letter by letter.
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            boxes = page.evaluate(
                "[...document.querySelectorAll('.home *')].filter(e => e.scrollHeight > e.clientHeight + 1"
                " && getComputedStyle(e).overflowY !== 'visible').map(e => e.className)"
            )
            assert boxes == []
            name = lines.first.locator(".name a").bounding_box()
            assert name is not None and name["height"] < 60, "two lines at most"
            if folder := os.environ.get("RAYTRAIN_PICTURES"):
                page.screenshot(path=f"{folder}/home-{width}.png", full_page=True)


def test_the_home_needs_no_sideways_scrolling_in_any_window(visit: Visit, tmp_path: Path) -> None:
    options = {"model": "timm:convnextv2_tiny.fcmae_ft_in22k_in1k", "learning_rate": 0.0005724, "price": ("3",)}
    store = store_run(tmp_path, "first-run", [evaluation_row(1, accuracy=0.5)], **options)
    write_status(store, replace(read_status(store), dollars=1234.5))
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        line = page.locator(".home tbody tr")
        expect(line).to_contain_text("$1,234.50")
        for width in (1366, 1321, 1280, 1141, 1061, 1041, 1024, 900, 821, 800, 761, 320):
            page.set_viewport_size({"width": width, "height": 700})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            model = line.locator(".model span").bounding_box()
            assert model and model["width"] > 60, "the name of the model is cut off, but not hidden"


def test_the_home_is_sorted_by_any_column_and_compares_the_runs_that_are_chosen(visit: Visit, tmp_path: Path) -> None:
    for name, rate, accuracy in (("a", 0.1, 0.3), ("b", 0.01, 0.9), ("c", 1.0, 0.6)):
        store_run(tmp_path, name, [evaluation_row(1, accuracy=accuracy)], learning_rate=rate)
    store_run(tmp_path, "d", [])  # never evaluated
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        names = page.locator(".home tbody .name a")
        page.get_by_role("button", name="Best accuracy").click()
        expect(names).to_have_text(["b", "c", "a", "d"])
        page.get_by_role("button", name="Best accuracy").click()
        expect(names).to_have_text(["a", "c", "b", "d"])
        page.get_by_role("button", name="Rate").click()
        expect(names.first).to_have_text("c")
        page.get_by_role("checkbox", name="compare a").check()
        page.get_by_role("checkbox", name="compare c").check()
        page.get_by_role("link", name="Compare 2 runs").click()
        expect(page.locator("article.comparison tbody tr")).to_have_count(2)
        expect(page.locator("article.comparison h1")).to_have_text("2 runs side by side")


def test_the_home_and_the_comparison_go_by_the_metric_of_best(visit: Visit, tmp_path: Path) -> None:
    for name, losses in (("rates-00", [0.9, 0.5]), ("rates-01", [0.8, 0.25]), ("rates-02", [0.7, 0.6])):
        rows = [evaluation_row(step, accuracy=1 - loss / 3, loss=loss) for step, loss in enumerate(losses, start=1)]
        store_run(tmp_path, name, rows, best="loss", learning_rate=len(name) + losses[0])
    points = [{"seed": seed} for seed in range(3)]
    write_json(store_run(tmp_path, "rates", [], best="loss"), SWEEP, {"vary": ["seed=0,1,2"], "points": points})
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        expect(page.locator(".home")).to_contain_text("3 runs, best rates-01")
        expect(page.locator(".home td.accuracy").first).to_have_text("0.25")
        page.get_by_role("button", name="runs of rates").click()
        page.get_by_role("button", name="Best loss").click()
        shown = page.locator(".home tbody tr.member .name a")
        expect(shown).to_have_text(["rates-01", "rates-00", "rates-02"])
        page.get_by_role("link", name="rates", exact=True).click()
        expect(page.locator("article.comparison h3", has_text="Validation loss")).to_have_count(1)
        expect(page.locator("article.comparison tbody th.name")).to_have_text(["rates-01", "rates-00", "rates-02"])
        expect(page.locator("article.comparison tbody td.accuracy")).to_have_text(["0.25", "0.5", "0.6"])


def test_the_home_says_what_it_leaves_out_and_shows_the_others(visit: Visit, tmp_path: Path) -> None:
    for name in ("good", "without-status"):
        store_run(tmp_path, name, [evaluation_row(1, accuracy=0.5)])
    shutil.copytree(tmp_path / "good", tmp_path / "good (copy)")
    (tmp_path / "without-status" / STATUS).unlink()
    (tmp_path / "loop").symlink_to("loop")
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, 0) as server:
        page = visit(server.url)
        expect(page.locator(".home tbody .name a")).to_have_text(["good", "without-status"])
        expect(page.locator(".left-out li")).to_have_count(2)
        expect(page.locator(".left-out")).to_contain_text("no run may be called 'good (copy)'")


def test_a_page_on_a_phone_needs_no_sideways_scrolling(visit: Visit, tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(step, loss=1 / step, accuracy=0.5) for step in range(1, 50)])
    with page_of(tmp_path, "run") as server:
        page = visit(server.url, viewport={"width": 375, "height": 700}, color_scheme="dark")
        expect(page.locator(".pill")).to_have_text("running")
        assert ink(page, "Accuracy") > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_each_worker_has_a_line_about_its_machine_also_on_a_phone(visit: Visit, tmp_path: Path) -> None:
    cpu = MachineUse(rank=0, node=HOSTILE_NAME, images_per_s=1234.0, data_wait_fraction=0.25, cpu_fraction=0.5)
    memory = {"memory_bytes": 8 * 10**9, "memory_total_bytes": 16 * 10**9, "shared_memory_bytes": 2 * 10**9}
    store = {"object_store_bytes": 15 * 10**8, "object_store_total_bytes": 6 * 10**9}
    gpu = {"gpu": "H200", "gpu_fraction": 0.97, "gpu_memory_bytes": 70 * 10**9, "gpu_memory_total_bytes": 140 * 10**9}
    uses = cpu, replace(cpu, rank=1, node="node-2", **memory, **store, **gpu)
    rows = [step_row(step, loss=1.0) for step in range(1, 50)]
    runs = WatchedRuns(str(tmp_path), ["run"])
    with PageServer(runs, 0) as server:
        runs.update(snapshot(rows, machines=uses))
        for width in (1280, 390):
            page = visit(server.url, viewport={"width": width, "height": 800})
            lines = page.locator(".machines tbody tr")
            expect(lines).to_have_count(2)
            expect(lines.nth(0)).to_contain_text("1,23425.0 %50.0 %")
            expect(lines.nth(1)).to_contain_text("8.0 of 16.0 GB2.0 of 16.0 GB1.5 of 6.0 GBH20097.0 %70.0 of 140.0 GB")
            expect(page.locator("img")).to_have_count(0)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        runs.update(snapshot([], first_row=49, status="finished", machines=uses))
        expect(page.locator(".machines")).to_be_hidden()


def test_the_use_of_the_machines_of_a_run_that_is_over_is_drawn_over_its_time(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(step, loss=1.0) for step in range(1, 50)])
    history = MachineHistory()
    worker = MachineUse(rank=0, node=HOSTILE_NAME, images_per_s=1234.0, data_wait_fraction=0.25, cpu_fraction=0.5)
    for elapsed_s in range(5, 100, 5):
        store_use = {"object_store_bytes": elapsed_s, "object_store_total_bytes": 100}
        history.add(elapsed_s, [worker, replace(worker, rank=1, gpu_fraction=0.9, **store_use)])
    write_json(store, MACHINE_HISTORY, history.to_json())
    end_run(store, "finished", 49, "checkpoints/step-000000049.pt")
    with page_of(tmp_path, "run") as server:
        page = visit(server.url)
        for title in ("Images/s", "CPU", "Object store", "GPU use"):
            assert ink(page, title) > 0
        expect(page.locator("figure.chart", has_text="Images/s")).to_contain_text("worker 1")
        expect(page.locator("img")).to_have_count(0)


def test_the_use_of_the_machines_is_drawn_on_when_a_run_resumes(visit: Visit, tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(50, loss=1.0)])
    history = MachineHistory()
    use = MachineUse(rank=0, node="here", images_per_s=1.0, data_wait_fraction=0.1, cpu_fraction=0.5)
    for elapsed_s in (5, 10):
        history.add(elapsed_s, [use])
    write_json(store, MACHINE_HISTORY, history.to_json())
    end_run(store, "stopped", 50, "checkpoints/step-000000050.pt")
    with page_of(tmp_path, "run") as server:
        page = visit("about:blank")
        page.clock.install()
        page.goto(server.url)
        chart = page.locator("figure.chart", has_text="CPU")
        expect(chart).to_contain_text("50.0 %")
        history.add(15, [replace(use, cpu_fraction=0.75)])
        write_json(store, MACHINE_HISTORY, history.to_json())
        page.clock.fast_forward(11_000)  # the machines are read every ten seconds
        write_status(store, replace(read_status(store), status="running"))
        expect(chart).to_contain_text("75.0 %")
