"""Commands that look at the machines, or keep Ray ready on this one."""

from __future__ import annotations

import socket
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, arg

from raytrain.cli.command_result import CommandResult
from raytrain.cli.commands.arguments import Address, Storage
from raytrain.cli.commands.confirm import confirmed
from raytrain.runs.stop_request import StopRequest


def doctor(
    data: Annotated[str | None, arg(help="Images that every node must be able to read.")] = None,
    storage: Storage = "./runs",
    address: Address = None,
) -> CommandResult:
    """Check every node: its hardware and software, and whether it can read the data and write runs.

    Example: raytrain doctor --data s3://bucket/train --storage s3://bucket/runs
    """
    from raytrain.diagnostics.doctor import diagnose
    from raytrain.display.doctor_tables import doctor_page

    report = diagnose(data, storage, address)
    return CommandResult(doctor_page(report), report.summary(), exit_code=0 if report.ok else 1)


def up(
    idle_minutes: Annotated[float, arg(help="End it when nobody has used it for so many minutes.")] = 60.0,
) -> CommandResult:
    """Keep Ray ready on this machine: runs on Ray then start sooner, until `raytrain down`.

    Example: raytrain up --idle-minutes 120
    """
    from raytrain.backends.ray.warm_cluster import keep_warm

    kept = keep_warm(idle_minutes)
    text = (
        f"Ray is ready at {kept.address} for the next run on this machine. It ends with `raytrain down`, or when "
        f"nobody has used it for {kept.idle_minutes:g} minutes."
    )
    return CommandResult(text, {"address": kept.address, "pid": kept.pid, "idle_minutes": kept.idle_minutes})


def down(
    yes: Annotated[FlagCreatePairsOff[bool], arg(help="Do not ask, also if a command uses it.")] = False,
) -> CommandResult:
    """End the Ray that `raytrain up` keeps ready. A run that uses it stops with a checkpoint first.

    Example: raytrain down
    """
    from raytrain.backends.ray.warm_cluster import end, locked, running
    from raytrain.backends.ray.warm_end import stop_runs_and_end

    if (found := running()) is None:
        return CommandResult("No Ray is kept ready on this machine.", {"ended": None})
    with locked() as free:
        if free:
            end(found)
    if not free:
        if not yes and not confirmed("A command uses the Ray of `raytrain up`. Stop its run, and end Ray?"):
            return CommandResult("Nothing was ended.", {"ended": None}, exit_code=1)
        stop_runs_and_end(found, StopRequest(f"raytrain down on {socket.gethostname()}"))
    return CommandResult("Ray has ended.", {"ended": found.address})


def devices(address: Address = None) -> CommandResult:
    """List the devices of every node, with the numbers that --gpus takes.

    Example: raytrain devices
    """
    from raytrain.diagnostics.devices import list_devices
    from raytrain.display.device_tables import devices_page

    found = list_devices(address)
    return CommandResult(devices_page(found), found.summary())
