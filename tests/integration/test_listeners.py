"""What each command listens at is what docs/security.md says: for root on Linux."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.listeners import can_make_networks, listeners_of

pytestmark = pytest.mark.skipif(not can_make_networks(), reason="needs root, and the programs ip, ss and unshare")

RAYTRAIN = [sys.executable, "-m", "raytrain"]
DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


def documented(command: str) -> dict[str, int]:
    """The ports of ``command`` that others reach, by the table of the document: their number by the interface."""
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", DOCUMENT.read_text(), re.MULTILINE)
    (ports,) = [others for name, _, others in rows if name == command]
    return {place: int(number) for number, place in re.findall(r"(\d+) at (all interfaces|the node's address)", ports)}


def check(command: str, found: dict[str, int]) -> None:
    """Fail if ``found`` has other or more ports than the document names for ``command``, besides those at 127.0.0.1."""
    known = documented(command)
    more = {place: number for place, number in found.items() if place != "127.0.0.1" and number > known.get(place, 0)}
    assert not more, f"{command} has {more}, and {DOCUMENT.name} names {known}"


@pytest.fixture
def options(images: Path, tmp_path: Path) -> list[str]:
    here = ["--data", str(images), "--storage", str(tmp_path / "runs"), "--model", "tests.helpers.memory_runs:network"]
    size = ["--image-size", "12", "12", "--batch-size", "20", "--learning-rate", "0.05", "--epochs", "1"]
    return [*here, *size, "--precision", "float64", "--workers", "2"]


def test_training_without_ray_with_its_page_and_prometheus(options: list[str], tmp_path: Path) -> None:
    words = ["--backend", "local", "--name", "run", "--watch", "--track", "prometheus"]
    check("train --backend local", listeners_of([*RAYTRAIN, "train", *words, *options], tmp_path))
    found = listeners_of([*RAYTRAIN, "watch", "--storage", str(tmp_path / "runs")], tmp_path, "Watch it at")
    assert found == {"127.0.0.1": 1}
    check("watch", found)


@pytest.mark.slow
def test_training_on_ray_and_serving_what_was_trained(options: list[str], tmp_path: Path) -> None:
    check("train", listeners_of([*RAYTRAIN, "train", "--name", "run", *options], tmp_path))
    serve = ["serve", "run", "--storage", str(tmp_path / "runs"), "--trust"]
    check("serve", listeners_of([*RAYTRAIN, *serve], tmp_path, "Serving at"))


@pytest.mark.slow
def test_the_demo_and_a_sweep(options: list[str], tmp_path: Path) -> None:
    check("demo", listeners_of([*RAYTRAIN, "demo", "--storage", str(tmp_path / "runs")], tmp_path))
    sweep = ["sweep", "--name", "rates", *options[:-1], "1", "--vary", "learning-rate=0.01,0.1"]
    check("sweep", listeners_of([*RAYTRAIN, *sweep], tmp_path))
