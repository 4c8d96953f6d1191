"""A resume that has nothing to train says so, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import raytrain
from raytrain.errors import format_count
from raytrain.runs.outcome import StopReason
from tests.helpers.loops_with_networks import LOOPS
from tests.helpers.small_runs import config


def documents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_and_one_with_more_epochs_stay_as_they_are(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"backend": "local", "workers": 1, "image_size": (32, 32), "loop": LOOPS + "own", "flip": "none"}
    first = raytrain.train(config(images, tmp_path, epochs=2, **options))
    before = documents(tmp_path)
    for epochs in (2, 1):
        again = raytrain.train(config(images, tmp_path, epochs=epochs, resume=True, **options))
        assert (again.steps, again.status, again.validation_loss) == (first.steps, "finished", first.validation_loss)
        assert f"has 2 epochs already, and --epochs is {epochs}: there is nothing to do" in caplog.text
    assert documents(tmp_path) == before
    more = raytrain.train(config(images, tmp_path, epochs=3, resume=True, **options))
    assert more.epochs == 3


def test_a_run_that_has_its_steps_says_so(images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"backend": "local", "workers": 1, "image_size": (32, 32), "loop": LOOPS + "own", "flip": "none"}
    raytrain.train(config(images, tmp_path, max_steps=2, **options))
    before = documents(tmp_path)
    for max_steps in (2, 1):
        raytrain.train(config(images, tmp_path, max_steps=max_steps, resume=True, **options))
        assert f"has 2 steps already, and --max-steps is {max_steps}: there is nothing to do" in caplog.text
    assert documents(tmp_path) == before


@pytest.mark.parametrize(
    ("option", "value", "other"), [("until", "accuracy=0.0", "loss=0.000001"), ("patience", 1, None)]
)
def test_a_run_that_an_option_has_stopped_waits_for_another_value_of_it(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, option: str, value: object, other: object
) -> None:
    options = {"backend": "local", "workers": 1, "image_size": (32, 32), "loop": LOOPS + "own", "flip": "none"}
    options |= {"learning_rate": 1e-9, "best": "accuracy", "epochs": 4}
    first = raytrain.train(config(images, tmp_path, **options, **{option: value}))
    assert first.status == "stopped" and isinstance(first.stop_reason, StopReason)
    before = documents(tmp_path)
    again = raytrain.train(config(images, tmp_path, resume=True, **{**options, "epochs": 5}, **{option: value}))
    assert (again.steps, again.status, again.stop_reason) == (first.steps, "stopped", first.stop_reason)
    after = format_count(first.epochs, "epoch")
    assert f"was stopped by --{option} {value} after {after}: there is nothing to do" in caplog.text
    assert f"give another --{option}, or none, to train on" in caplog.text
    assert documents(tmp_path) == before
    more = raytrain.train(config(images, tmp_path, resume=True, **options, **{option: other}))
    assert (more.epochs, more.status) == (4, "finished")
