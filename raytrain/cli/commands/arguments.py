"""Arguments that commands of several subjects have."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

Address = Annotated[str | None, arg(help="Ray cluster to use; by default RAY_ADDRESS, else one on this machine.")]
RunName = Annotated[Positional[str], arg(help="Name of the run.")]
Storage = Annotated[str, arg(help="Where runs are stored: a folder or a URL (s3://…, gs://…, az://…).")]
Trust = Annotated[FlagCreatePairsOff[bool], arg(help="Run the network also if it is code of whoever wrote the run.")]
