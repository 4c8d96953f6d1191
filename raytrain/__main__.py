"""``python -m raytrain`` is the ``raytrain`` command."""

from raytrain.cli import run

run()
