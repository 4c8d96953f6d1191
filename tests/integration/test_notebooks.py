"""Every notebook runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from raytrain.datasets.upload import upload
from tests.conftest import extract_cifar10

_MAX_OUTPUTS = 3  # of a cell: a picture, what it prints, its result
_MAX_OUTPUT_CHARS = 250_000  # a figure of many photographs is the largest
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_the_readme_opens_them_with_the_live_view_beside_jupyterlab() -> None:
    readme = (NOTEBOOKS[0].parents[1] / "README.md").read_text()
    assert "`uv run --with jupyterlab --with anywidget jupyter lab notebooks`" in readme, "it looks in its environment"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_leaves_ray_to_raytrain(path: Path) -> None:
    code = "".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    assert "ray.init" not in code, "below `uv run`, Ray's own refuses a folder that has no pyproject.toml"


@pytest.mark.slow
def test_the_digits_notebook_learns_the_digits(tmp_path: Path) -> None:
    notebook = run("01-digits", tmp_path)
    accuracy, evaluation, classified = (
        results(notebook, name) for name in ("await raytrain.start(config", "raytrain.evaluate(", "model.classify(")
    )
    assert "('finished', " in accuracy
    assert float(evaluation.split("%")[0]) >= 97
    assert "('6', 0." in classified or "('6', 1.0" in classified
    assert "20 steps on 2 workers, then up to 36 on 1" in results(notebook, "resume=True")


@pytest.mark.slow
def test_the_notebook_trains_a_custom_loop_in_the_background(tmp_path: Path) -> None:
    notebook = run("02-your-own-loop", tmp_path)
    # The last picture shows a run that has ended.
    assert "Ctrl-C stops" not in pictures(notebook, "handle = raytrain.start(")
    assert "stopped" in pictures(notebook, "handle = raytrain.start(")
    assert results(notebook, "handle.stop(") == "('stopped', 'enough for now')"
    assert results(notebook, "max_steps=stopped.steps + 10").endswith("('finished', 10)")
    assert "finished" in pictures(notebook, "max_steps=stopped.steps + 10"), "the resumed run is watched as well"
    assert "'in_three': " in results(notebook, "read_run(")
    assert results(notebook, "raytrain.audit(") == "(True, True)"


@pytest.mark.slow
def test_the_cloud_notebook_stops_a_run_and_resumes_it_from_a_bucket(
    ray_cluster: None, cifar10_folder: Path, s3_url: str, tmp_path: Path
) -> None:
    import ray

    upload(str(cifar10_folder), f"{s3_url}/cifar10")
    notebook = run(
        "03-cifar10-in-the-cloud",
        tmp_path,
        data=f"{s3_url}/cifar10",
        storage=f"{s3_url}/runs",
        address=ray.get_runtime_context().gcs_address,
        workers=2,
        workers_later=1,
        options={"device": "cpu", "batch_size": 50, "learning_rate": 0.05, "log_every": 1},
    )
    assert "Nothing prevents training." in results(notebook, "diagnose(")
    assert "stopped" in pictures(notebook, "raytrain.start(config)")
    stopped, finished = results(notebook, "handle.stop("), results(notebook, "resume=True")
    (steps,) = re.findall(r"\('stopped', (\d+), 2, 'seen enough'\)", stopped)
    later = 6 * (int(steps) // 6 + 2)  # the end of two more epochs of 6 steps
    assert f"('finished', {later}, 1)" in finished
    assert [num_drawn(notebook, words) for words in ("curve_figure(", "confusion_figure(", "raytrain.predict(")] == [
        1,
        1,
        1,
    ]
    assert len(re.findall(r"\('[a-z]+', [01]\.\d+\)", results(notebook, "model.classify("))) == 3


@pytest.mark.slow
def test_the_transfer_notebook_improves_the_accuracy(tmp_path: Path) -> None:
    extract_cifar10(tmp_path / "cifar10", num_train=150, num_validation=20)
    notebook = run("04-transfer-learning", tmp_path, num_before=150, num_after=20, epochs_before=8, epochs_after=6)
    accuracies = [
        float(re.findall(r"([\d.]+)%", results(notebook, f'name="{name}"'))[0])
        for name in ("from-nothing", "transferred")
    ]
    assert accuracies[1] > accuracies[0]
    assert num_drawn(notebook, "comparison_figure(") == 1
    assert results(notebook, "layers that moved").startswith("layers that moved: [13, 14, 16,")


def num_drawn(notebook: nbformat.NotebookNode, words: str) -> int:
    """Return the number of pictures that the cell with ``words`` drew."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def pictures(notebook: nbformat.NotebookNode, words: str) -> str:
    """Return the final HTML below the cell with ``words``."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


def run(name: str, folder: Path, **parameters: Any) -> nbformat.NotebookNode:
    """Run a notebook in ``folder`` with other values for its parameters cell; return it with its outputs."""
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
        assert all(re.search(rf"\b{name}\b.* = ", cell.source) for name in parameters)
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    executed = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in executed.cells:  # what is redrawn replaces what was there before
        assert len(cell.get("outputs", ())) <= _MAX_OUTPUTS, cell.source
        assert len(json.dumps(cell.get("outputs", ()))) <= _MAX_OUTPUT_CHARS, cell.source
    return executed


def results(notebook: nbformat.NotebookNode, words: str) -> str:
    """Return as text what the cell with ``words`` printed and returned."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
