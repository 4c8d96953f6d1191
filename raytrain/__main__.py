"""``raytrain`` and ``python -m raytrain`` are the command; Ctrl-C during its import is a sentence, too."""

import sys


def run() -> None:
    """Import the command line, and run that of this process; never returns."""
    try:
        from raytrain.cli.main import run as run_command
    except KeyboardInterrupt:  # most of the time until the command itself looks after Ctrl-C
        print("raytrain: aborted.", file=sys.stderr, flush=True)
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    run()
