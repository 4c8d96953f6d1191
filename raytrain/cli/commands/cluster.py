"""Commands that look at machines, and the one that sends a command to a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from raytrain.cli.command import Address, CommandResult, Flag, Storage, ask
from raytrain.cli.commands.training import sweep, train
from raytrain.cli.parser import config_file_of, parse
from raytrain.config import TrainConfig
from raytrain.errors import UsageError, did_you_mean, flag
from raytrain.runs.redact import one_line, printable

if TYPE_CHECKING:
    from raytrain.launch.job_files import JobFiles


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
    dry_run: Annotated[
        Flag,
        arg(
            help="Check the command, what would be sent, and by a small job whether the cluster reaches the buckets, "
            "and with whose keys; train nothing."
        ),
    ] = False,
) -> CommandResult:
    """Train on a cluster from here: send it a command with the code of your own that it imports, and follow it.

    Ctrl-C stops the run with a checkpoint, or leaves it running: you are asked.

    Example: raytrain submit --address http://HEAD:8265 -- train cifar10 --data s3://bucket/train --storage s3://bucket/runs
    """
    # The options are checked here and now, not minutes later on the cluster.
    commands = {"train": train, "sweep": sweep}
    if not command or command[0] not in commands:
        wrong = f", not {command[0]}{did_you_mean(command[0], commands)}" if command else ""
        raise UsageError(
            f"Give train or sweep after --{wrong}, such as `raytrain submit -- train cifar10 --data s3://bucket/train`."
        )
    options = parse(command, commands).keywords
    config: TrainConfig = options["config"]

    from raytrain.launch.job_files import job_files
    from raytrain.launch.option_checks import check_options_of_job
    from raytrain.launch.ray.submit import DETACHED, follow_job
    from raytrain.launch.ray.submit import submit as send

    check_options_of_job(config, is_sweep=command[0] == "sweep")
    if command[0] == "sweep" and not config.resume:
        _check_trials(config, options)
    files = job_files(config, include, config_file_of(command))
    if dry_run:
        return _rehearse(command, config, files, address)

    # Ctrl-C while the job is followed asks whether it stops or goes on without this command.
    sent = send(command, config, files, address)
    content = f"{_size(files)} of {files.folder}" if files.paths else "the command (no files of your own)"
    left_out = f", {len(files.left_out)} left out (--dry-run lists them)" if files.left_out else ""
    _print_note(f"Sent {content}{left_out} as job {sent.job} to {sent.server.address}. The run is called {sent.name}.")
    status = follow_job(sent, _print_output, _print_note, _wants_to_detach)
    if status == DETACHED:
        text = f"Run {sent.name} goes on. Stop it with `raytrain stop {sent.name} --storage {sent.storage}`."
    else:
        text = f"Job {sent.job}: {status.lower()}."
    document = {"name": sent.name, "job": sent.job, "status": status.lower(), "storage": sent.storage}
    return CommandResult(text, document)


def _check_trials(config: TrainConfig, options: dict[str, Any]) -> None:
    """Raise UsageError if the ``options`` of a sweep cannot be read, or make trials that are not allowed.

    ``config`` has the options of all trials, and ``options`` has the other arguments of the command, such as ``vary``.
    """
    from raytrain.experiments.sweep_plan import plan_sweep
    from raytrain.experiments.trials import examples_of

    vary = [word for words in options["vary"] for word in words]
    planned = plan_sweep(config, vary, options["sweeping"])
    for trial in examples_of(planned, config, config.name or "sweep"):
        if config.loop is None:
            trial.config.check_learning_rate()


def _rehearse(command: Sequence[str], config: TrainConfig, files: JobFiles, address: str | None) -> CommandResult:
    """Return a page of about ten lines: the job that `submit` would send, and whether the cluster could run it.

    If the cluster's address is known, from ``address`` or the environment, this sends it a small job, which looks at
    what each node reads and writes, and waits for its end. The exit code is 1 if a node has a problem. Raises
    UsageError if the cluster cannot be checked.
    """
    import raytrain
    from raytrain.config.options import own_functions
    from raytrain.launch.ray.submit import JobServer, ask_doctor, entrypoint, job_server_url

    own_code = [f"{flag(option)} {name}" for option, name in own_functions(config)]
    rows = [
        ("command", entrypoint(command)),
        ("code", f"{', '.join(own_code)}: found" if own_code else "none of your own"),
        ("files", f"{_size(files)} of {files.folder}" if files.paths else "none"),
        *(("", f"{path} ({num_bytes:,} bytes)") for path, num_bytes in files.sizes.items()),
        *(("not sent", path) for path in files.left_out),
        ("raytrain", f"{version('raytrain')}, from {Path(raytrain.__file__).parent}"),
    ]
    document: dict[str, Any] = {
        "command": entrypoint(command),
        "folder": str(files.folder),
        "files": files.sizes,
        "left_out": files.left_out,
        "cluster": None,
    }

    # Without an address, only what this machine knows is checked.
    is_ready = True
    if address or any(os.environ.get(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")):
        server = JobServer(job_server_url(address))
        _print_note(f"Asking the cluster at {server.address} what it reaches, by a job that trains nothing …")
        document["cluster"] = report = ask_doctor(server, config, _print_note)
        rows.append(("cluster", f"{server.address}, Ray {server.ray_version or 'of unknown version'}"))
        for node in report["nodes"]:
            problems = node["report"]["problems"] if node["report"] else [node["error"]]
            is_ready = is_ready and not problems
            lines = problems or [_what_node_reaches(node["report"], config)]
            rows += [("", f"{node['address']}: {line}") for line in lines]
    else:
        rows.append(("cluster", "not checked: give --address http://HOST:8265"))
    last_line = "Nothing was trained." if is_ready else "Nothing was trained, and nothing could be."
    text = "\n".join(one_line(f"{name:9} {words}".rstrip()) for name, words in rows)
    return CommandResult(f"{text}\n{last_line}", document, exit_code=0 if is_ready else 1)


def _size(files: JobFiles) -> str:
    """Return the number and the size of the files that a job gets, as people read it: ``3 files (4,096 bytes)``."""
    num, num_bytes = len(files.paths), sum(files.sizes.values())
    size = f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes:,} bytes"
    return f"{num} file{'' if num == 1 else 's'} ({size})"


def _what_node_reaches(report: dict[str, Any], config: TrainConfig) -> str:
    """Return the line about a node without problems: where it reads and writes, and with whose keys."""
    read = f"reads {config.data} ({report['read_speed']['images_per_s']:,.0f} images/s), " if config.data else ""
    # The report calls keys that a node has been lent "driver's". The driver is the job, which runs on the head.
    identity = (report["identity"] or "").replace("driver's", "the keys of the head:")
    return f"{read}writes {config.storage}{f', with {identity}' if identity else ''}"


def _print_output(text: str) -> None:
    """Print what the job printed, which may end within a line."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _print_note(line: str) -> None:
    """Print a line of this command itself, to standard error."""
    print(f"raytrain: {line}", file=sys.stderr, flush=True)


def _wants_to_detach() -> bool:
    """Return True if the person at the terminal, who is asked, lets the run go on; without a terminal, it stops."""
    if not sys.stdin.isatty():
        return False
    return ask("\nStop the run with a checkpoint (s), or leave it running (l)? [s] ").startswith("l")
