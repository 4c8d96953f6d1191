"""Commands that look at machines, and that are carried out on a cluster."""

from __future__ import annotations

import sys
from typing import Annotated

from tyro.conf import Positional, arg

from raytrain.cli.command import Address, CommandResult, Flag, Storage
from raytrain.cli.commands.training import sweep, train
from raytrain.cli.parser import parse
from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.runs.redact import one_line, printable


def doctor(
    data: Annotated[str | None, arg(help="Images that every node must be able to read.")] = None,
    storage: Storage = "./runs",
    address: Address = None,
) -> CommandResult:
    """Check every node: its hardware and software, and whether it can read the data and write runs.

    Example: raytrain doctor --data s3://bucket/train --storage s3://bucket/runs
    """
    from raytrain.diagnostics.doctor import diagnose
    from raytrain.display.diagnostics_tables import doctor_page

    report = diagnose(data, storage, address)
    return CommandResult(doctor_page(report), report.summary(), exit_code=0 if report.ok else 1)


def devices(address: Address = None) -> CommandResult:
    """List the devices of every node, with the numbers that --device takes.

    Example: raytrain devices
    """
    from raytrain.diagnostics.node_probe import list_devices
    from raytrain.display.diagnostics_tables import devices_page

    nodes = list_devices(address)
    return CommandResult(devices_page(nodes), {"nodes": [node.devices() for node in nodes]})


JobServerAddress = Annotated[
    str | None,
    arg(help="The cluster's job server, http://HOST:8265; by default RAY_API_SERVER_ADDRESS or RAY_ADDRESS."),
]


def submit(
    command: Annotated[Positional[tuple[str, ...]], arg(help="After --: the command, train or sweep.", metavar="…")],
    address: JobServerAddress = None,
    include: Annotated[
        tuple[str, ...], arg(help="Files and folders that your code needs besides what it imports.")
    ] = (),
    dry_run: Annotated[Flag, arg(help="List the files that would be sent, and send nothing.")] = False,
) -> CommandResult:
    """Train on a cluster from here: send it a command with the code of your own that it imports, and follow it.

    Ctrl-C stops the run with a checkpoint, or leaves it running: you are asked.

    Example: raytrain submit --address http://HEAD:8265 -- train cifar10 --data s3://bucket/train --storage s3://bucket/runs
    """
    # The options are checked here, rather than minutes later on the cluster.
    commands = {"train": train, "sweep": sweep}
    if not command or command[0] not in commands:
        raise UsageError(
            "Give the command after --, such as `raytrain submit -- train cifar10 --data s3://bucket/train`."
        )
    config: TrainConfig = parse(command, commands).keywords["config"]

    from raytrain.launch.ray.submit import DETACHED, files_to_send, follow_job
    from raytrain.launch.ray.submit import submit as send

    files = files_to_send(config, include)
    size = f"{len(files.paths)} files ({sum(files.sizes.values()) / 1e6:.1f} MB) of {files.folder}"
    about = size if files.paths else "the command, without files of your own"
    if files.left_out:
        about += f", {len(files.left_out)} left out (--dry-run lists them)"
    if dry_run:
        from rich.text import Text

        lines = [f"{num_bytes:>12,} bytes  {path}" for path, num_bytes in files.sizes.items()]
        lines += [f"    not sent        {path}" for path in files.left_out]
        document = {"folder": str(files.folder), "files": files.sizes, "left_out": files.left_out}
        return CommandResult(Text("\n".join(map(one_line, [*lines, f"Would be sent: {about}."]))), document)

    sent = send(command, config, files, address)
    _note(f"Sent {about} as job {sent.job} to {sent.server.address}. The run is called {sent.name}.")
    # Ctrl-C while the job is followed asks whether it stops or goes on without this command.
    status = follow_job(sent, _show, _note, _wants_to_detach)
    left = f"Run {sent.name} goes on. Stop it with `raytrain stop {sent.name} --storage {sent.storage}`."
    text = left if status == DETACHED else f"Job {sent.job}: {status.lower()}."
    document = {"name": sent.name, "job": sent.job, "status": status.lower(), "storage": sent.storage}
    return CommandResult(text, document)


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _note(line: str) -> None:
    print(f"raytrain: {line}", file=sys.stderr, flush=True)


def _wants_to_detach() -> bool:
    """Ask the person at the terminal whether the run goes on; without a terminal, it stops."""
    if not sys.stdin.isatty():
        return False
    answer = input("\nStop the run with a checkpoint (s), or leave it running (l)? [s] ")
    return answer.strip().lower().startswith("l")
