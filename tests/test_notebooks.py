"""Every notebook runs from top to bottom, and is kept without what it printed."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_digits_are_learned(tmp_path: Path) -> None:
    notebook = run("01-digits", tmp_path)
    accuracy, evaluation, classified = (
        results(notebook, name) for name in ("raytrain.train(config", "raytrain.evaluate(", "model.classify(")
    )
    assert "status='finished'" in accuracy
    assert float(evaluation.split("%")[0]) >= 97
    assert "('6', 0." in classified or "('6', 1.0" in classified
    assert results(notebook, "resume=True").startswith("20 steps on 2 workers, then up to 36 on 1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loop_of_ones_own_is_trained_beside_the_notebook(tmp_path: Path) -> None:
    notebook = run("02-your-own-loop", tmp_path)
    assert "Ctrl-C stops" not in pictures(notebook, "raytrain.start(")  # the last picture is of a run that is over
    assert "stopped" in pictures(notebook, "raytrain.start(")
    assert results(notebook, "handle.stop(") == "('stopped', 'enough for now')"
    assert results(notebook, "max_steps=stopped.steps + 10") == "('finished', 10)"
    assert "'in_three': " in results(notebook, "read_run(")
    assert results(notebook, "raytrain.audit(") == "(True, True)"


def pictures(notebook: nbformat.NotebookNode, words: str) -> str:
    """The HTML below the cell that contains ``words``, as it stood in the end."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


def run(name: str, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in ``folder``."""
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    return NotebookClient(nbformat.read(path, as_version=4), timeout=500, resources={"metadata": {"path": str(folder)}}).execute()


def results(notebook: nbformat.NotebookNode, words: str) -> str:
    """What the cell that contains ``words`` printed and returned, as text."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
