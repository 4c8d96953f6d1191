"""Call one function in this process and write its result to a file as JSON: ``MODULE:FUNCTION ARGUMENTS FILE``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path


def main(name: str, arguments: str, file: str) -> None:
    module, _, function = name.partition(":")
    result = getattr(import_module(module), function)(**json.loads(arguments))
    Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
