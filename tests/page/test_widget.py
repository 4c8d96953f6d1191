"""The widget of a run in a notebook: executed without a front end, and used in JupyterLab."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient
from playwright.sync_api import Page, expect
from rich.text import Text

from raytrain.demo.demo import render_digits
from raytrain.display.notebook import as_html
from raytrain.display.page.widget import RunWidget
from raytrain.runs.documents import SUMMARY, read_json
from raytrain.storage.open import open_store
from tests.helpers.browser_pages import expect_later_step, ink
from tests.helpers.snapshots import snapshot
from tests.helpers.stored_histories import evaluation_row, step_row

START = """
import raytrain
config = raytrain.recipes.digits(
    name="run", data="digits/train", test_data="digits/test", backend="local", workers=1, epochs={epochs}, log_every=1
)
handle = raytrain.start(config)
"""
MISTAKES = (
    """
import raytrain
config = raytrain.recipes.digits(data="digits/train", test_data="digits/test", backend="local", workers=1, max_steps=1)
""",
    """
raytrain.train(raytrain.recipes.digits(data="nowhere", backend="local", workers=1))
""",
    """
handle = raytrain.start(raytrain.recipes.digits(data="nowhere", backend="local", workers=1))
await handle
""",
    """
def loop(run):
    for epoch in run.epochs():
        for batch in epoch:
            batch.images.reshape(3, 5, 7)
raytrain.train(config, loop=loop)
""",
)
FRAMES = """
from tests.helpers.snapshots import snapshot
from tests.helpers.stored_histories import step_row
with View(CONSOLE) as view:
    for step in range(1, 50):
        view.update(snapshot([step_row(step)], first_row=step - 1, step=step, num_steps=50))
"""
TRIALS = """
from raytrain.experiments.sweep_result import SweepSnapshot
from raytrain.experiments.trial_results import TrialResult
with View(CONSOLE) as view:
    for epoch in range(1, 50):
        trial = TrialResult(name="rates-00", values={}, run_dir="", status="running", epoch=epoch, num_epochs=50)
        view.update(SweepSnapshot(trials=(trial,)))
"""
ROOT = Path(__file__).parents[2]
WAIT = "(await handle).status"


def test_a_front_end_that_opens_late_gets_the_whole_run() -> None:
    widget = RunWidget(stop=lambda: None)
    widget.update(snapshot([step_row(1, loss=3.0)]))
    widget.draw()
    widget.update(snapshot([step_row(2, loss=float("nan")), evaluation_row(2, loss=1.0)], first_row=1))
    widget.draw()
    curves = widget.message["curves"]
    assert curves["step"]["step"] == [1, 2]
    assert curves["step"]["metrics"]["loss"]["mean"] == [3.0, None]
    assert curves["evaluation"]["metrics"]["loss"]["mean"] == [1.0]


def test_a_front_end_without_widgets_says_what_is_missing() -> None:
    shown, _ = DisplayFormatter().format(RunWidget(stop=lambda: None))
    assert "JupyterLab needs anywidget" in shown["text/plain"]


@pytest.mark.slow
def test_an_executed_notebook_keeps_the_last_picture(tmp_path: Path) -> None:
    notebook = NotebookClient(stored_notebook(tmp_path, epochs=2), resources={"metadata": {"path": tmp_path}}).execute()
    shown, result = (cell.outputs for cell in notebook.cells)
    assert [output.data.get("text/plain") for output in result] == ["'finished'"]
    assert "widget" not in "".join(shown[0].data)
    assert "finished" in shown[0].data["text/html"] and "evaluated after epoch 2" in shown[0].data["text/html"]


def test_a_view_in_an_executed_notebook_keeps_its_last_picture_alone() -> None:
    own_console = "__import__('rich.console').console.Console(force_jupyter=False)"
    views = (
        ("terminal", "TerminalView", "None", FRAMES),
        ("terminal", "TerminalView", own_console, FRAMES),
        ("sweep", "SweepTerminalView", "None", TRIALS),
    )
    sources = [
        f"from raytrain.display.{module} import {name} as View\nCONSOLE = {console}\n{update}"
        for module, name, console, update in views
    ]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    cells = NotebookClient(notebook, resources={"metadata": {"path": ROOT}}).execute().cells
    for cell in cells:
        (shown,) = cell.outputs
        assert "49" in shown.data["text/html"] and ">48" not in shown.data["text/html"]
    assert "interrupt the kernel to stop all with checkpoints" in cells[-1].outputs[0].data["text/html"]


def test_an_error_in_a_notebook_is_a_sentence_with_its_line_and_a_view_says_why_a_run_cannot_start(
    tmp_path: Path,
) -> None:
    render_digits(tmp_path / "digits", num_images=100)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in MISTAKES])
    client = NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}, allow_errors=True)
    cells = client.execute().cells
    errors = [cell.outputs[-1].traceback for cell in cells[1:]]
    assert all(len(lines) == 2 and len(lines[0]) < 500 for lines in errors), errors
    assert all(lines[0].startswith("StorageError: There is no folder") for lines in errors[:2])
    assert errors[0][1] == 'cell In[2], line 1: raytrain.train(raytrain.recipes.digits(data="nowhere", ' + (
        'backend="local", workers=1))'
    )
    assert "starting the workers" not in str(cells[1].outputs), "a run that is refused starts nothing"
    assert errors[1][1] == "cell In[3], line 2: await handle"
    assert "(cell In[4], line 4: `batch.images.reshape(3, 5, 7)`)" in errors[2][0]
    below_the_start = [output.get("data", {}).get("text/html", "") for output in cells[2].outputs]
    assert any("nowhere" in html for html in below_the_start), below_the_start


def test_each_dot_of_a_picture_has_the_width_of_a_letter() -> None:
    html = as_html(Text("│\u28ff\u2800\u2801│"))
    assert html.count("width:1ch") == 2 and ">\u28ff</i> <i" in html  # no font of a browser need have the dots


@pytest.mark.slow
def test_a_run_is_watched_and_stopped_in_jupyterlab(visit: Callable[..., Page], tmp_path: Path) -> None:
    stored_notebook(tmp_path, epochs=100_000)
    with jupyterlab(tmp_path) as url:
        page = visit(url.replace("/lab?", "/lab/tree/run.ipynb?"), viewport={"width": 1300, "height": 1000})
        expect(page.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible()  # it drops cells before
        page.locator(".jp-CodeCell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        page.keyboard.press("Shift+Enter")
        expect(page.locator(".raytrain .pill")).to_have_text("running")
        expect_later_step(page, 5)
        assert ink(page, "Loss") > 0
        page.locator(".raytrain").get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Stop the run").click()
        expect(page.locator(".jp-OutputArea-executeResult pre")).to_have_text("'stopped'")
        expect(page.locator(".jp-OutputArea-output").first).to_contain_text("stop requested: the Stop button")
        page.keyboard.press("Control+s")
        expect(page.locator(".jp-mod-dirty")).to_have_count(0)
    saved = nbformat.read(tmp_path / "run.ipynb", as_version=4)
    assert "stopped" in saved.cells[0].outputs[0].data["text/html"]
    assert read_json(open_store(str(tmp_path / "runs" / "run")), SUMMARY)["checkpoint"]


def stored_notebook(folder: Path, epochs: int) -> nbformat.NotebookNode:
    """A notebook in ``folder`` that starts a run and waits for it, beside its images."""
    render_digits(folder / "digits", num_images=300)
    cells = [nbformat.v4.new_code_cell(source) for source in (START.format(epochs=epochs), WAIT)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": ""}})
    nbformat.write(notebook, folder / "run.ipynb")
    return notebook


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """JupyterLab over ``folder``, with settings of its own; its address."""
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--port=0",
        "--allow-root",
        f"--notebook-dir={folder}",
    ]
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = {**os.environ, **{name: str(folder / ".jupyter" / name) for name in names}}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            yield next(line.split()[-1] for line in process.stderr if "http://127.0.0.1" in line)
        finally:
            process.terminate()
