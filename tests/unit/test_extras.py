"""What a sentence advises if a package is missing can be typed where raytrain was installed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from raytrain.config import extras

REQUIRES = [
    "numpy<3",
    "onnxruntime<2,>=1.20; extra == 'onnx'",
    "onnxscript<1; extra == 'onnx'",
    "timm; extra == 'timm'",
]


def advised(folder: Path, installer: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the advice for ONNX of a raytrain that ``installer`` has put into ``folder``."""
    package, about = folder / "raytrain" / "config", folder / "raytrain-0.1.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    copy = package / "extras.py"
    copy.write_text(Path(extras.__file__).read_text())
    (about / "INSTALLER").write_text(installer + "\n")
    lines = [
        "Metadata-Version: 2.1",
        "Name: raytrain",
        "Version: 0.1.0",
        *(f"Requires-Dist: {one}" for one in REQUIRES),
    ]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(folder)
    return runpy.run_path(str(copy))["extra"]("onnx")


@pytest.mark.parametrize(("installer", "pip"), [("uv", "uv pip"), ("pip", "pip")])
def test_a_package_names_what_its_extra_needs(
    installer: str, pip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = advised(tmp_path, installer, monkeypatch)
    assert advice == f"raytrain[onnx] (`{pip} install 'onnxruntime<2,>=1.20' 'onnxscript<1'`)"


def test_a_checkout_in_its_own_environment_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert advised(tmp_path, "uv", monkeypatch) == f"raytrain[onnx] (`uv sync --inexact --extra onnx` in {tmp_path})"


def test_a_checkout_in_another_environment_is_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "my raytrain"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    assert advised(checkout, "pip", monkeypatch) == f"raytrain[onnx] (`pip install -e '{checkout}[onnx]'`)"
