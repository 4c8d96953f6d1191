"""The runs of a page: fed by their own process, or read from storage."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from raytrain.config import TrainConfig
from raytrain.config.evaluation import is_fraction
from raytrain.data.labels.manifest import Manifest
from raytrain.display.page.feed import RunFeed
from raytrain.display.result_page import resume_heading
from raytrain.display.run_tables import run_info_json
from raytrain.errors import RaytrainError, StorageError, shell_command
from raytrain.experiments.best_metric import BestMetric, best_metric_of
from raytrain.experiments.compare import not_compared
from raytrain.experiments.find_rate import stored_suggestion
from raytrain.experiments.sweep_plan import Sweep
from raytrain.experiments.trials import names_of, sweep_of
from raytrain.monitor.run_reader import RunReader
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.documents import (
    EVALUATION,
    SUMMARY,
    SUSPICIOUS_LABELS,
    VALIDATION_MANIFEST,
    ignore,
    plain,
    read_config,
    read_json,
    run_store,
)
from raytrain.runs.machine_history import MachineHistory, read_machine_history
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.outcome import StopReason, resume_command, stop_reason_of
from raytrain.runs.provenance import read_provenance
from raytrain.runs.records import RunInfo, list_runs, read_unused_options
from raytrain.runs.status import RunStatus, read_status
from raytrain.runs.stored_checkpoints import newest_checkpoint
from raytrain.storage.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

_NUM_CURVES, _NUM_POINTS = 100, 200  # most curves that the list of runs shows, and most points of each
_READ_EVERY_S = 1.0
_READ_FRACTION = 0.1
"""Largest fraction of the time that is spent on reading: a long history in slow storage is read less often."""


class WatchedRuns:
    """Runs below ``storage`` by their ``names``, in the order in which they are shown.

    The process that trains a run passes the run's snapshots to :meth:`update`; ``ask_to_stop`` stops that run.
    :class:`StoredRuns` reads snapshots from storage instead. Without ``ask_to_stop``, a request to stop is written
    there.
    """

    def __init__(
        self, storage: str, names: Sequence[str], ask_to_stop: Callable[[StopReason], None] | None = None
    ) -> None:
        self.storage = storage
        self._ask_to_stop = ask_to_stop
        self.feeds = [RunFeed(name) for name in names]
        self.phase = ""  # of the start of a run, such as ``listing the images``
        self._keys: dict[tuple[str, str], Any] = {}  # of validation images, by run and the start of its first attempt
        self._sweeps: dict[str, str | None] = {}  # of which runs are trials, by the name of the run; None for others
        self._sweep_dollars: dict[str, float] = {}  # cost of all trials together so far, by the name of the sweep
        self.on_change: Callable[[], object] = lambda: None
        """Called after each change, in any thread."""

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``; a run that is not known yet is added."""
        feed = next((feed for feed in self.feeds if feed.name == snapshot.name), None)
        if feed is None:
            feed = RunFeed(snapshot.name)
            self.feeds.append(feed)
        feed.update(snapshot)
        self.on_change()

    def show_phase(self, phase: str) -> None:
        """Show the phase of a start, such as ``listing the images``."""
        self.phase = phase
        self.on_change()

    def description(self, chosen: Sequence[str] | None) -> dict[str, Any]:
        """Return what a viewer gets first, and again when it changes: its runs, not what they do.

        These are the names of the ``chosen`` runs (all if None), where they are stored, the phase of a start, the costs
        of their sweeps, and the command that shows them again.
        """
        runs = [feed.name for feed in self.feeds_of(chosen)]
        sweeps = {self._sweeps.get(name) for name in runs}
        sweep_dollars = {name: dollars for name, dollars in self._sweep_dollars.items() if name in sweeps}
        return {
            "storage": self.storage,
            "runs": runs,
            "home": False,
            "phase": self.phase,
            "sweep_dollars": sweep_dollars,
            "again": shell_command("watch", *runs, storage=self.storage),
        }

    def feeds_of(self, chosen: Sequence[str] | None) -> list[RunFeed]:
        """Return the feeds of the ``chosen`` runs, or of all runs without a choice."""
        return [feed for feed in self.feeds if chosen is None or feed.name in chosen]

    def documents(self, name: str) -> dict[str, Any]:
        """Return the documents of a run that a page shows: options, provenance, last evaluation, how to resume it.

        A search for a learning rate also has the rate that its losses suggest. What cannot be read is empty or None.
        """
        store = run_store(self.storage, name)
        documents: dict[str, Any] = {
            "config": None,
            "metric": _metric_json(best_metric_of(None)),
            "not_compared": sorted(not_compared()),
            "made_of": "",
            "heartbeat_at": "",
            "suggestion": None,
            "resume": None,
            "evaluation": {},
            "suspicious": {},
        }

        # The options, and what follows from them and the status. If a document cannot be read, the rest is not, either.
        began_at = ""
        with suppress(RaytrainError, FileNotFoundError):
            config = read_config(store, ignore)
            documents["config"] = config
            documents["metric"] = _metric_json(best_metric_of(config))
            documents["not_compared"] = sorted(not_compared().union(read_unused_options(store)))
            if attempts := read_provenance(store):
                documents["made_of"], began_at = attempts[-1].summary(), attempts[0].started_at
            status = read_status(store)
            documents["heartbeat_at"] = status.heartbeat_at
            documents["resume"] = self._resume_command(name, store, config, status)
            if config.is_range_test and not status.active:
                rate, reason = stored_suggestion(read_metrics(store), stop_reason_of(read_json(store, SUMMARY)))
                documents["suggestion"] = {"rate": rate, "reason": reason}

        # What the run has found in its images.
        with suppress(StorageError):
            documents["evaluation"] = self._evaluation(name, store, began_at)
        with suppress(StorageError):
            documents["suspicious"] = read_json(store, SUSPICIOUS_LABELS)
        return plain(documents)

    def _evaluation(self, name: str, store: Store, began_at: str) -> dict[str, Any]:
        """Return the last evaluation of a run, in which the worst images have their keys, if these can be read.

        Raises StorageError if the evaluation cannot be read.
        """
        evaluation = read_json(store, EVALUATION)

        # The evaluation names images by their index in the manifest, whose keys are read once for each run. A run that
        # was deleted and trained anew has begun at another time. An evaluation of a stranger's may be anything.
        with suppress(StorageError, FileNotFoundError, KeyError, IndexError, TypeError, ValueError):
            if (name, began_at) not in self._keys:
                self._keys[name, began_at] = Manifest.from_parquet(store.get(VALIDATION_MANIFEST)).keys
            for example in evaluation["worst"]:
                example["key"] = self._keys[name, began_at][example["sample"]].as_py()
        return evaluation

    def _resume_command(self, name: str, store: Store, config: TrainConfig, status: RunStatus) -> dict[str, str] | None:
        """Return the command that resumes a run that has not finished, with its heading; None if no command does.

        A trial is resumed with its sweep. The command may be typed on another machine, so workers and device are auto.
        """
        # Nothing is left to resume, or there is no checkpoint: a search for a rate never writes one.
        if status.active or status.status == "finished" or config.is_range_test:
            return None
        if not status.step and newest_checkpoint(store) is None:
            return None

        # If the loop is a function in a script, only that script can resume the run: the last attempt was started by
        # another command than raytrain's, has stored code, and its options name no loop.
        provenance = next(reversed(read_provenance(store)), None)
        if provenance is not None and provenance.code and config.loop is None:
            is_raytrain_command = re.search(r"(^|[ /])raytrain ", provenance.command)
            if not is_raytrain_command:
                return None

        # A trial is resumed by the command of its sweep.
        subcommand, verb = "train", "Resume"
        if (sweep := sweep_of(self.storage, name)) is not None:
            sweep_config = read_config(run_store(self.storage, sweep), ignore)
            name, config, subcommand, verb = sweep, sweep_config, "sweep", "Resume the sweep"
        anywhere = dataclasses.replace(
            config, name=name, storage=self.storage, workers="auto", device="auto", worker_load=None
        )
        reason = stop_reason_of(read_json(store, SUMMARY))
        return {"heading": resume_heading(verb, reason), "command": resume_command(anywhere, subcommand)}

    def machine_history(self, name: str) -> dict[str, Any]:
        """Return the use of the workers' machines over the time of a run; empty if it cannot be read."""
        history = MachineHistory()
        with suppress(StorageError):
            history = read_machine_history(run_store(self.storage, name))
        return plain(history.to_json())

    def stop(self, name: str) -> None:
        """Ask the run called ``name`` to stop with a checkpoint.

        Raises UsageError if it does not train, StorageError if the request cannot be written.
        """
        reason = StopReason("page", socket.gethostname())
        if self._ask_to_stop is not None:
            self._ask_to_stop(reason)
        else:
            request_stop(self.storage, name, reason)


class StoredRuns(WatchedRuns):
    """Runs that train in other processes, or are over: a thread reads the documents of each while this is open."""

    def __init__(self, storage: str, names: Sequence[str]) -> None:
        super().__init__(storage, names)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for feed in self.feeds:
            self._follow(feed)
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, feed: RunFeed) -> None:
        """Read a run from now on, in a thread."""
        reader = RunReader(run_store(self.storage, feed.name).fail_fast(), feed.name)
        thread = threading.Thread(target=self._read, args=(reader, feed), daemon=True, name="reader")
        self._threads.append(thread)
        thread.start()

    def _read(self, reader: RunReader, feed: RunFeed) -> None:
        """Read a run again and again until this is closed, and pass what is read to its feed.

        Storage that is out of reach may be back the next time; until then, viewers see the error.
        """
        # Trials of a sweep may share machines, so the sweep has a cost of its own. The thread that is the first to know
        # a trial of it reads that, too.
        priced_sweep: str | None = None
        while not self._closed.is_set():
            started = time.monotonic()
            try:
                if reader.exists():  # a trial of a sweep may start later
                    self.update(reader.snapshot(feed.cursor))
                if feed.name not in self._sweeps:
                    sweep = sweep_of(self.storage, feed.name)
                    priced_sweep = None if sweep in [*self._sweeps.values()] else sweep
                    self._sweeps[feed.name] = sweep
                if priced_sweep is not None:
                    self._read_cost(priced_sweep)
            except RaytrainError as error:
                feed.report(str(error))
                self.on_change()
            # A long history is read without a pause between its pieces.
            if not reader.behind:
                self._closed.wait(max(_READ_EVERY_S, (time.monotonic() - started) / _READ_FRACTION))

    def _read_cost(self, name: str) -> None:
        """Read what a sweep has cost so far, if it was started with --price."""
        dollars = read_status(run_store(self.storage, name).fail_fast()).dollars
        if dollars is not None and dollars != self._sweep_dollars.get(name):
            self._sweep_dollars[name] = dollars
            self.on_change()


class HomeRuns(StoredRuns):
    """All runs below ``storage``: a list of them, and the feed of each run once somebody has opened it."""

    def __init__(self, storage: str) -> None:
        super().__init__(storage, [])
        self._opening = threading.Lock()  # two viewers may open the same run at the same time
        # By run: the heartbeat that it had when its evaluations were read, and these. They are read again after that.
        self._curves: dict[str, tuple[str | None, _Measured]] = {}

    def description(self, chosen: Sequence[str] | None) -> dict[str, Any]:
        """Return what a viewer gets first; without a choice, the viewer shows the list of runs."""
        return {**super().description(chosen or []), "home": chosen is None}

    def feeds_of(self, chosen: Sequence[str] | None) -> list[RunFeed]:
        """Return the feeds of the ``chosen`` runs; without a choice, none."""
        return super().feeds_of(chosen or [])

    def open(self, name: str) -> list[str]:
        """Read the run or the trials of the sweep called ``name`` from now on, and return their names.

        Raise UsageError if there is no such run.
        """
        names = names_of(self.storage, name)
        with self._opening:
            opened = {feed.name for feed in self.feeds}
            for new in names:
                if new not in opened:
                    feed = RunFeed(new)
                    self.feeds.append(feed)
                    self._follow(feed)
        return names

    def all_runs(self) -> dict[str, Any]:
        """Return all runs below the storage, the newest first, as plain values.

        ``runs`` has for each run what the list shows of it: ``group`` is its sweep, and ``measured`` its metric in the
        last evaluations, for the newest 100 runs. ``left_out`` are sentences about folders that cannot be read. Raises
        StorageError if listing fails.
        """
        left_out: list[str] = []
        runs = list_runs(self.storage, left_out.append)

        # Trials are shown below their sweep, if that is in the list, too.
        listed = {run.name for run in runs}
        plans: dict[str, Sweep | None] = {}
        sweeps = {
            run.name: sweep_of(self.storage, run.name, plans) for run in runs if run.name.rpartition("-")[0] in listed
        }

        entries: list[dict[str, Any]] = []
        for number, run in enumerate(runs):
            metric = best_metric_of(run.config)
            measured = self._measured(run, metric) if number < _NUM_CURVES else _Measured([], None)
            entries.append(
                {
                    **run_info_json(run),
                    "group": sweeps.get(run.name),
                    "metric": _metric_json(metric),
                    "measured": measured.curve,
                    "best_value": run.best_value if measured.best is None else measured.best,
                }
            )
        return {"storage": self.storage, "left_out": left_out, "runs": entries}

    def _measured(self, run: RunInfo, metric: BestMetric) -> _Measured:
        """Return the values of ``metric`` in the last 200 evaluations of a run, and the best value of all evaluations.

        The history is read again if the run has a new heartbeat, or if the last read failed.
        """
        read_at, measured = self._curves.get(run.name, (None, _Measured([], None)))
        if read_at != run.status.heartbeat_at:
            with suppress(RaytrainError):
                rows = read_metrics(run_store(self.storage, run.name).fail_fast(), ignore)
                values = plain([row.metrics.get(metric.name) for row in rows if row.kind == "evaluation"])
                best = max((value for value in values if value is not None), key=metric.score, default=None)
                measured = _Measured(values[-_NUM_POINTS:], best)
                self._curves[run.name] = run.status.heartbeat_at, measured
        return measured


class _Measured(NamedTuple):
    """A run's metric of --best in its last evaluations, and the best value in any evaluation."""

    curve: list[float | None]
    best: float | None


def _metric_json(metric: BestMetric) -> dict[str, Any]:
    """Return the metric of ``--best`` as plain values: ``name``, ``is_lower_better`` and ``is_fraction``."""
    return {**metric._asdict(), "is_fraction": is_fraction(metric.name)}
