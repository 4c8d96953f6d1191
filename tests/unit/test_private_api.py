"""The private APIs of Ray that raytrain uses exist; if one is missing, the error says what it was used for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from raytrain.launch.ray.private_api import PRIVATE_APIS, PrivateApi

PACKAGE = Path(__file__).parents[2] / "raytrain"


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: f"{api.module}.{api.name}")
def test_this_ray_has_every_private_api_that_raytrain_uses(api: PrivateApi) -> None:
    assert api.load() is not None


def test_a_missing_private_api_is_reported_in_one_sentence_with_its_purpose() -> None:
    gone = PrivateApi("ray.train.v2._internal.no_such_module", "Callback", "end workers")
    with pytest.raises(
        ImportError, match=r"Ray [\d.]+ has no ray.train.v2._internal.no_such_module.Callback, which .* to end workers"
    ):
        gone.load()


@pytest.mark.not_quick
def test_private_modules_of_ray_are_named_in_one_file() -> None:
    found = subprocess.run(
        ["grep", "-rlE", r"ray\._private|ray\._raylet|ray\.\w+(\.\w+)*\._internal", str(PACKAGE), "--include=*.py"],
        capture_output=True,
        text=True,
    )
    assert [Path(path).relative_to(PACKAGE).as_posix() for path in found.stdout.split()] == [
        "launch/ray/private_api.py"
    ]
    assert re.search(r"ray\._private", (PACKAGE / "launch/ray/private_api.py").read_text())
