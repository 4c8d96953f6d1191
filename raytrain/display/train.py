"""`raytrain.train` and `raytrain.start`, which show a run in the terminal or the notebook where it was started."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raytrain.config.option_calls import takes_config
from raytrain.display.notebook import NotebookView, is_notebook
from raytrain.display.terminal import default_view
from raytrain.launch.option_checks import check_options
from raytrain.launch.train import RunHandle
from raytrain.launch.train import train as launch_run
from raytrain.monitor.snapshot import View
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.outcome import TrainResult
from raytrain.trackers.open_trackers import Trackers

if TYPE_CHECKING:
    from raytrain.config import TrainConfig
    from raytrain.training.run import Run


@takes_config
def train(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    signals: StopSignals | None = None,
    trackers: Trackers = (),
    started_at: float | None = None,
) -> TrainResult:
    """Train as ``config`` says, and return when the run is finished or has stopped with a checkpoint.

    It trains on Ray, or without Ray on this machine if ``config.backend`` is ``local``.

    Args:
        config: the options; see :class:`TrainConfig`.
        loop: a training loop to use instead of the built-in one (``raytrain/training/loop.py``) or the one that
            ``config`` names.
        view: called about twice a second with the run's :class:`Snapshot`. By default, in the main thread, the run is
            shown as by ``raytrain train``: as a picture in a terminal or below a notebook's cell, else as lines;
            ``lambda snapshot: None`` shows nothing.
        signals: where stop requests come from; by default Ctrl-C, SIGTERM and SIGHUP, if this is the main thread.
        trackers: where else to send metrics, besides those that ``config.track`` names: names like those, or objects
            with the methods of :class:`raytrain.trackers.tracker.Tracker`, such as Lightning's loggers.
        started_at: when the run's time begins, by ``time.monotonic()``; now by default.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the run ended early; the sentence says why and how to resume.

    Example:
        >>> result = raytrain.train(raytrain.recipes.custom(data="s3://bucket/images", epochs=5))
        >>> print(result.validation_accuracy)
    """
    with default_view(view) as shown:
        return launch_run(config, loop=loop, view=shown, signals=signals, trackers=trackers, started_at=started_at)


@takes_config
def start(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    trackers: Trackers = (),
) -> RunHandle:
    """Start a run like :func:`raytrain.train`, but return at once, with a handle of the run.

    Args:
        config: the options.
        loop: a training loop of your own.
        view: called about twice a second with the run's :class:`Snapshot`. By default, in a notebook, it draws the run
            below the cell: with the extra ``raytrain[notebook]`` as live curves with a Stop button.
        trackers: as for :func:`raytrain.train`.

    Raises:
        UsageError: no run can start with the options. What is found out later, the handle raises.

    Example::

        run = raytrain.start(raytrain.recipes.digits(data="digits"))
        run.stop("it is good enough")
    """
    check_options(config, loop)
    if view is not None or not is_notebook():
        return RunHandle(config, loop, view, trackers)

    # The view is made first, so that the cell shows something at once. Its Stop button stops the run of the handle,
    # which is made right after it.
    notebook_view = NotebookView(stop=lambda: handle.stop("the Stop button in the notebook"))
    handle = RunHandle(config, loop, notebook_view.update, trackers, notebook_view.fail)
    return handle
