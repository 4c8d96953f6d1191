"""``python -m raytrain`` is the ``raytrain`` command."""

from raytrain.cli.commands import run

run()
