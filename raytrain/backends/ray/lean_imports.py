"""Keep a package from Ray's processes that takes longer to import than Ray itself, and that Ray does not use.

``import ray`` imports jsonschema, and jsonschema imports rfc3987-syntax, if it is there, to check strings that are
international web addresses. JupyterLab brings it along. It builds a grammar as it is imported, which took 1.7 of the
2.8 seconds of a core of ``import ray``, in each of some fifteen processes. jsonschema does without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LEFT_OUT = "rfc3987_syntax"
_STAND_INS = Path(__file__).with_name("stand_ins")


def lean(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for Ray's processes, which then find a module of this name whose import fails at once."""
    path = os.pathsep.join(filter(None, [str(_STAND_INS), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


@contextmanager
def lean_imports() -> Iterator[None]:
    """Leave the package out as long as the ``with`` block lasts, unless this process has it already."""
    modules: dict[str, Any] = sys.modules
    leave_out = modules.setdefault(_LEFT_OUT, None) is None
    try:
        yield
    finally:
        if leave_out:
            modules.pop(_LEFT_OUT, None)
