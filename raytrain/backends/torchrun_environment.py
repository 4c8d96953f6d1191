"""Whether torchrun started this process, and as which one. Needs no torch: the command line must start at once."""

from __future__ import annotations

import os


def is_under_torchrun() -> bool:
    """Whether torchrun (torch's elastic agent) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_process() -> bool:
    """Whether this process speaks for all that torchrun started; True without torchrun."""
    return not is_under_torchrun() or os.environ["RANK"] == "0"
