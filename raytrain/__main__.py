"""``python -m raytrain`` is the ``raytrain`` command."""

from raytrain.cli.main import run

if __name__ == "__main__":
    run()
