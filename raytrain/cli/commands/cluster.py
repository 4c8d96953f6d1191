"""Commands that look at the machines."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import arg

from raytrain.cli.command_result import CommandResult
from raytrain.cli.commands.arguments import Address, Storage


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


def devices(address: Address = None) -> CommandResult:
    """List the devices of every node, with the numbers that --device takes.

    Example: raytrain devices
    """
    from raytrain.diagnostics.devices import list_devices
    from raytrain.display.device_tables import devices_page

    found = list_devices(address)
    return CommandResult(devices_page(found), found.summary())
