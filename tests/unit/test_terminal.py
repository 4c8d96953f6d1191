"""The terminal: the live dashboard, the plain lines without a terminal, and the plots."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from raytrain.display.braille_plot import Plot, Series
from raytrain.display.console import PlainConsole, key_value_table
from raytrain.display.curves import comparison_plots, curve_plots, side_by_side
from raytrain.display.dashboard import dashboard
from raytrain.display.terminal import TerminalView
from raytrain.monitor.events import CheckpointWritten, Note, StopRequested, TimedEvent
from raytrain.runs.logs import STARTUP
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason
from tests.helpers.rendered import text
from tests.helpers.run_records import finished
from tests.helpers.snapshots import snapshot


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step_row(step: int, loss: float | None = 1.234) -> MetricRow:
    return MetricRow(
        kind="step",
        step=step,
        epoch=1,
        images_per_s=8512.3,
        learning_rate=0.2,
        data_wait_fraction=0.034,
        metrics={"loss": loss, "accuracy": 0.567},
    )


def evaluation_row(step: int, loss: float, accuracy: float) -> MetricRow:
    return MetricRow(kind="evaluation", step=step, epoch=1, metrics={"loss": loss, "accuracy": accuracy})


def test_the_dashboard_shows_the_state_of_the_run() -> None:
    rows = [step_row(10), step_row(230)]
    seen = text(
        dashboard(
            snapshot(
                rows,
                num_skipped=3,
                num_retries=4_096,
                events=(TimedEvent(0, 62, CheckpointWritten("step-000000200.pt", 200)),),
            ),
            rows,
        )
    )
    for part in (
        "first",
        "running",
        "Epoch: 3, Elapsed: 00:12:34",
        "23%",
        "step 230/1,000",
        "epoch 3/10",
        "00:01:20 left",
    ):
        assert part in seen
    for part in (
        "2 workers",
        "8,512 images/s",
        "learning rate 0.2",
        "waiting for data 3%",
        "3 skipped",
        "4,096 retries",
    ):
        assert part in seen
    assert "00:01:02  checkpoint step-000000200.pt written" in seen
    assert "Ctrl-C stops with a checkpoint" in seen


def test_the_dashboard_shows_a_stop_request() -> None:
    rows = [step_row(10)]
    assert "stopping" in text(dashboard(snapshot(rows, stop_request=StopReason("signal", "SIGINT")), rows))
    over = text(dashboard(snapshot(rows, stop_request=StopReason("signal", "SIGINT"), status="stopped"), rows))
    assert "stopped" in over
    assert "Ctrl-C stops" not in over


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_dashboard_keeps_its_width_and_height(width: int) -> None:
    rows = [step_row(step) for step in range(10, 500, 10)]
    events = tuple(TimedEvent(k, 0.0, Note("something long that happened " * 20)) for k in range(10))
    few, many = (
        text(dashboard(snapshot(rows[:1]), rows[:1]), width),
        text(dashboard(snapshot(rows, events=events), rows), width),
    )
    assert max(len(line) for line in many.splitlines()) == width
    assert len(few.splitlines()) == len(many.splitlines())


def test_a_loop_may_log_any_metrics() -> None:
    row = MetricRow(kind="step", step=10, epoch=1, metrics={"generator_loss": 0.5})
    assert "step 10/1,000" in text(dashboard(snapshot([row]), [row]))
    terminal, out, _ = view()
    terminal.update(snapshot([row]))
    assert out.getvalue() == "step 10/1,000  epoch 1/10  generator loss 0.500  00:01:20 left\n"


def test_a_run_without_metrics_has_a_dashboard() -> None:
    seen = text(dashboard(snapshot([], status="starting", time_left_s=None), []))
    assert "starting" in seen and "waiting for the workers …" in seen
    assert "waiting for the workers" not in text(dashboard(snapshot([]), []))


def plotted(ys: list[float | None], height: int = 4) -> list[str]:
    """Return the lines of a plot of ``ys`` over 0, 1, 2, …, without axis and heading."""
    lines = text(Plot("loss", [Series("train", "cyan", range(len(ys)), ys)], height), width=28).splitlines()
    return [line.partition("┤" if "┤" in line else "│")[2] for line in lines[1:-1]]


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = plotted([3.0, 2.0, 1.0, 0.0])
    starts = [len(line) - len(line.lstrip()) for line in lines]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert len(lines[-1].rstrip()) == 20


def test_a_flat_line_and_a_single_point_are_drawn() -> None:
    assert sum(bool(line.strip()) for line in plotted([1.0, 1.0, 1.0])) == 1
    assert sum(len(line.strip()) for line in plotted([1.0])) == 1


def test_a_line_has_no_gaps_for_any_number_of_points() -> None:
    for num_points in (2, 7, 10_000):
        lines = plotted([float(k % 7) for k in range(num_points)])
        assert all(any(line[column : column + 1].strip() for line in lines) for column in range(20))


def test_missing_and_nan_losses_are_left_out_of_a_curve() -> None:
    assert plotted([3.0, None, float("nan"), 0.0]) == plotted([3.0, 2.0, 1.0, 0.0])
    assert "train nan" not in text(curve_plots([step_row(1, loss=None)]))


def test_axes_and_heading_show_the_values() -> None:
    rows = [step_row(10, loss=2.5), step_row(1200, loss=0.5), evaluation_row(1200, 0.75, 0.8)]
    seen = text(curve_plots(rows))
    for part in ("loss", "train 0.500", "validation 0.750", "2.5 ┤", "0.5 ┤", "10", "step 1,200", "●"):
        assert part in seen


def test_a_narrow_plot_shows_whole_values_in_as_many_lines() -> None:
    rows = [step_row(10, loss=2.5), step_row(1200, loss=0.5), evaluation_row(1200, 0.75, 0.8)]
    seen, wide = text(curve_plots(rows), width=80), text(curve_plots(rows), width=120)
    for part in ("train 0.500", "validation 0.750", "validation 0.800"):
        assert part in seen
    assert len(seen.splitlines()) == len(wide.splitlines())


def view() -> tuple[TerminalView, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return TerminalView(Console(file=out, width=60), interval_s=10, clock=clock), out, clock


def test_without_a_terminal_one_line_is_printed_per_interval() -> None:
    terminal, out, clock = view()
    terminal.update(snapshot([step_row(120)]))
    clock.now_s += 5
    terminal.update(snapshot([step_row(130)], first_row=1))
    clock.now_s += 6
    terminal.update(snapshot([step_row(140, loss=None)], first_row=2))
    clock.now_s += 11
    terminal.update(snapshot([], first_row=3))
    clock.now_s += 11
    terminal.update(snapshot([step_row(160)], step=167, num_retries=1))  # the next row comes with step 180
    first, second, third = out.getvalue().splitlines()
    assert first == (
        "step 120/1,000  epoch 2/10  loss 1.234  accuracy 0.567  8,512 images/s  learning rate 0.2  "
        "waiting for data 3%  00:01:20 left"
    )
    assert second.startswith("step 140/1,000  epoch 2/10  loss nan")
    assert third.startswith("step 167/1,000  epoch 2/10  at step 160: loss 1.234  accuracy 0.567")
    assert "  1 retry  " in third


def test_without_a_terminal_each_event_is_one_line() -> None:
    terminal, out, _ = view()
    events = (
        TimedEvent(0, 62.0, Note("checkpoint [of] step 200")),
        TimedEvent(1, 63.0, StopRequested(StopReason("signal", "SIGINT"))),
    )
    terminal.update(snapshot([], events=events[:1]))
    terminal.update(snapshot([], events=events))
    terminal.update(snapshot([], events=events))
    assert out.getvalue().splitlines() == [
        "00:01:02  checkpoint [of] step 200",
        "00:01:03  stop requested: Ctrl-C; the step ends first, a second one aborts",
    ]


def test_each_event_of_a_run_that_was_started_again_in_this_process_is_one_line() -> None:
    terminal, out, _ = view()
    events = tuple(TimedEvent(number, 62.0 + number, Note(f"event {number}")) for number in range(3))
    terminal.update(snapshot([], events=events))
    again = tuple(TimedEvent(number, 80.0 + number, Note(f"event {number}")) for number in range(2))
    terminal.update(snapshot([], events=again[:1]))
    terminal.update(snapshot([], events=again))
    assert out.getvalue().splitlines()[3:] == ["00:01:20  event 0", "00:01:21  event 1"]


def test_the_last_step_is_printed_when_the_run_ends() -> None:
    terminal, out, _ = view()
    terminal.update(snapshot([step_row(120)]))
    terminal.update(snapshot([step_row(1000)], first_row=1, status="finished"))
    assert "step 1,000/1,000" in out.getvalue()


def test_the_last_line_has_the_last_measurements_though_the_step_was_printed_before() -> None:
    terminal, out, clock = view()
    clock.now_s += 11
    terminal.update(snapshot([step_row(950)], step=1000))  # the step has ended, and its row is still to come
    last = snapshot([step_row(1000, loss=0.25)], first_row=1, status="finished")
    terminal.update(last)
    terminal.update(last)
    lines = out.getvalue().splitlines()
    assert ["at step 950: loss 1.234" in lines[0], "loss 0.250" in lines[1], len(lines)] == [True, True, 2]


def screen(out: io.StringIO) -> str:
    """Return the final text on the screen: the output after the last erased line, without control sequences."""
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", out.getvalue().rpartition("\x1b[2K")[2])


def wait_for_two_things(console: Console) -> None:
    with TerminalView(console):
        STARTUP.info("listing [the] images …")
        STARTUP.info("a name\x1b[2J")
    STARTUP.info("nobody looks any more")


def test_the_last_step_is_printed_once_also_if_its_row_came_before_the_end() -> None:
    terminal, out, _ = view()
    terminal.update(snapshot([step_row(120)]))
    terminal.update(snapshot([step_row(1000)], first_row=1))
    for _ in range(2):
        terminal.update(snapshot([], first_row=2, step=1000, status="finished"))
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["step 120", "step 1,000"]


def test_in_a_terminal_a_line_says_what_the_start_waits_for() -> None:
    out = io.StringIO()
    wait_for_two_things(Console(file=out, force_terminal=True, width=100, height=40))
    assert "a name␛[2J" in out.getvalue() and "nobody" not in out.getvalue()
    assert screen(out).strip() == ""


def test_handlers_of_a_script_print_above_the_picture_and_not_what_it_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler()
    monkeypatch.setattr(root, "handlers", [handler])
    with TerminalView(Console(file=out, force_terminal=True, width=100, height=40)):
        STARTUP.info("listing the images …")
        root.warning("a warning")
    root.warning("later")
    assert capsys.readouterr().err == "later\n"
    assert handler.stream is sys.stderr
    assert out.getvalue().count("a warning\n") == 1 and "listing" in out.getvalue()

    # Somebody who asks for the lines of raytrain gets them in a log, too.
    monkeypatch.setattr(logging.getLogger("raytrain"), "level", logging.INFO)
    with TerminalView(Console(file=io.StringIO())):
        STARTUP.info("listing the images …")
    assert capsys.readouterr().err == "listing the images …\n"


def test_without_a_terminal_the_start_is_told_in_lines(capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    wait_for_two_things(Console(file=out))
    assert (out.getvalue(), *capfd.readouterr()) == ("listing [the] images …\na name␛[2J\n", "", "")


def test_in_a_terminal_the_dashboard_is_redrawn_in_place_and_stays() -> None:
    out = io.StringIO()
    with TerminalView(Console(file=out, force_terminal=True, width=100, height=40)) as terminal:
        assert "starting the workers" in out.getvalue()
        terminal.update(snapshot([step_row(120)]))
        terminal.update(snapshot([step_row(130)], first_row=1))
    assert "\x1b[1A" in out.getvalue()  # The cursor goes up to overwrite the first dashboard.
    assert "step 130/1,000" in screen(out)
    assert "step 120/1,000" not in screen(out)
    assert max(map(len, screen(out).splitlines())) == 98  # where the cursor is, there is room for ^C


def test_a_run_that_never_started_leaves_nothing_on_the_screen() -> None:
    out = io.StringIO()
    with TerminalView(Console(file=out, force_terminal=True, width=100, height=40)):
        pass
    assert screen(out).strip() == ""


# Several runs.


@pytest.mark.parametrize("num_runs", [2, 3, 7])
def test_names_of_compared_runs_are_never_cut(num_runs: int) -> None:
    names = [f"cifar10-rate-0.{number}-momentum" for number in range(num_runs)]
    rows = [
        step_row(10, loss=2.5),
        evaluation_row(10, 2.0, 0.25),
        step_row(20, loss=0.5),
        evaluation_row(20, 0.75, 0.8),
    ]
    seen = text(side_by_side(*comparison_plots([finished(name, rows) for name in names], names)), width=80)
    for name in names:
        assert f"━ {name}" in seen
    assert seen.count("0.500") == seen.count("0.800") == num_runs
    assert "…" not in seen


def test_a_name_wider_than_its_plot_is_wrapped() -> None:
    names = ["x" * 60, "second"]
    records = [finished(names[0], [step_row(10)]), finished(names[1], [])]
    seen = text(side_by_side(*comparison_plots(records, names)), width=80)
    assert seen.count("x") >= 2 * 60
    assert max(map(len, seen.splitlines())) <= 80


@pytest.mark.parametrize("values", [[1e30, 1e30], [-1e308, 1e308], [1e17, 1e17 + 16], [-1e-12, -1e-12]])
def test_values_of_any_size_are_drawn_and_named_in_a_few_letters(values: list[float]) -> None:
    drawn = text(Plot("loss", [Series("train", "cyan", [1, 2], values)], height=4), width=60)
    assert re.search("[\u2801-\u28ff]", drawn)
    assert max(map(len, re.findall(r"[\d,.e+-]+", drawn))) <= 9


def test_columns_of_zero_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "0")
    console = PlainConsole(file=io.StringIO())
    console.print(key_value_table({"num_images": 5}))
    assert console.file.getvalue() == "images  5\n"  # type: ignore[attr-defined]
    assert console.height > 0


class Writer:
    """An object that can only write, which scripts put in the place of sys.stdout."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text


def test_a_standard_output_that_can_only_write_is_printed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    monkeypatch.setattr(sys, "stdout", writer)
    with TerminalView() as view:
        view.update(snapshot([]))
    PlainConsole().print("the end")
    assert writer.written.endswith("the end\n")


@pytest.mark.parametrize(("value", "shown"), [(0.25, "0.250"), (46.9, "46.9"), (46_900.0, "46,900")])
def test_legends_have_as_many_digits_as_are_worth_reading(value: float, shown: str) -> None:
    seen = text(Plot("images/s", [Series("measured", "cyan", [1, 2], [1.0, value])]))
    assert seen.splitlines()[0].endswith(f"measured {shown}")


def test_an_outlier_does_not_flatten_a_plot_and_a_lone_point_is_drawn() -> None:
    ys = [1.0 + 0.01 * step for step in range(40)]
    plain = text(Plot("loss", [Series("train", "cyan", list(range(40)), ys)]))
    spiky = text(Plot("loss", [Series("train", "cyan", list(range(41)), [5000.0, *ys])]))
    assert "5,000" not in spiky and "≥" in spiky and "≥" not in plain
    assert sum(bool(re.search(r"[┤│] *[^ ]", line)) for line in spiky.splitlines()) >= 6  # lines with dots
    assert "•" in text(Plot("loss", [Series("train", "cyan", [1], [0.5])]))


def test_a_run_that_resumes_shows_no_step_before_it_trains() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with TerminalView(console) as view:
        view.update(snapshot([step_row(10)], status="starting", step=0))
        later = MetricRow(kind="step", step=11, epoch=1, metrics={"loss": 1.0, "second_learning_rate": 2e-5})
        view.update(snapshot([later], first_row=1, step=11, status="finished"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 1 and "step 11/1,000" in lines[0] and "second learning rate 2e-05" in lines[0]
