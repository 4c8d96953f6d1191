// One chart: some lines, bands and points over the steps or the time, with zoom, hover values and a logarithmic scale.

import { align } from "./curves.js";
import { UNKNOWN, el, fill, formatDuration, formatNumber, formatRate } from "./format.js";

/* global uPlot */

const MAX_VALUES = 8; // as many as there are colours
const FEW_POINTS = 60; // each of which is marked
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat(); // there is no half of a step
const TICKS = { step: compact, time: formatDuration, rate: (value) => (value == null ? "" : value < 1e-3 ? value.toExponential(0) : formatRate(value)) };
const AXIS_LABELS = { step: "step", time: "time", rate: "learning rate" };
const PLACES = { step: (x) => `step ${formatNumber(x)}`, time: formatDuration, rate: (x) => `learning rate ${formatRate(x)}` };
const KEYS = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25], Escape: [-Infinity, Infinity] };

export class Chart {
  /**
   * @param title the heading.
   * @param format shows a value of the y axis, with the digits that tell ticks apart whose distance is its second argument.
   * @param onZoom called with [first, last] on the x axis, or null for all of it.
   * @param sync charts with the same key share their cursor.
   * @param limits the ends of the y axis, or null for those of the values.
   */
  constructor({ title, format = formatNumber, onZoom = () => {}, sync = "run", limits = null }) {
    this.title = title;
    this.format = format;
    this.onZoom = onZoom;
    this.sync = sync;
    this.limits = limits;
    this.log = false;
    this.axis = "step";
    this.series = [];
    this.range = null;
    this.whole = null;
    this.plot = null;
    this.values = el("div", { class: "values" });
    this.logButton = el("button", { type: "button", class: "quiet", "aria-pressed": "false", title: "logarithmic scale; here + and - zoom, arrows move, Escape shows all", click: () => this.toggleLog() }, "log");
    this.canvas = el("div", { class: "plot" });
    this.element = el("figure", { class: "chart", keydown: (event) => this.press(event) }, el("figcaption", {}, el("h3", {}, title), this.values, this.logButton), this.canvas);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  /**
   * Show `series`: objects with `label`, `x`, `y`, `color` (a CSS variable), and perhaps `width`, `alpha`, `points`,
   * `low` and `high` (a band), `quiet` (without a value in the heading), `measured` (what the heading says in place of a
   * smoothed `y`), `dash`, `lost` (the last value is no number, as after a divergence). `range` is the visible part, or null:
   * then `whole` is seen, the ends of the x axis, by default those of the series.
   */
  show(series, { axis = "step", range = null, whole = null } = {}) {
    const bands = series.filter((one) => one.low).length;
    const shape = JSON.stringify([axis, bands, series.map(({ label, color, alpha, width, points }) => [label, color, alpha, width, points])]);
    this.series = series;
    this.range = range;
    this.whole = whole;
    if (!range) this.ends = whole ?? ends(series);
    if (shape !== this.shape || axis !== this.axis) {
      this.shape = shape;
      this.axis = axis;
      this.rebuild();
      return;
    }
    this.plot?.setData(this.data(), false);
    this.rescale();
  }

  /** Show another heading, and values in another format. */
  retitle({ title, format }) {
    this.title = title;
    this.format = format;
    this.element.querySelector("h3").textContent = title;
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.rebuild();
  }

  /** Draw anew, as after a change of the theme. */
  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !this.series.length) return;
    this.plot = new uPlot(this.options(width, height), this.data(), this.canvas);
    this.rescale();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!this.plot) this.rebuild();
    else if (width && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({ width, height });
  }

  rescale() {
    const xs = this.plot?.data[0];
    if (!xs) return;
    let [min, max] = this.range ?? this.whole ?? [xs[0] ?? 0, xs.at(-1) ?? 1];
    if (min === max) [min, max] = this.axis === "rate" ? [min / 2, 2 * min] : [min - 0.5, min + 0.5]; // a point is in the middle
    this.zooming = true;
    this.plot.batch(() => this.plot.setScale("x", { min, max }));
    this.zooming = false;
    this.showValues(null);
  }

  data() {
    const lines = this.series.flatMap(({ x, y, low, high }) => (low ? [{ x, y: low }, { x, y: high }, { x, y }] : [{ x, y }]));
    const [xs, ...columns] = align(lines);
    this.measured = align(this.series.map(({ x, y, measured }) => ({ x, y: measured ?? y }))).slice(1);
    if (!this.log) return [xs, ...columns];
    return [xs, ...columns.map((column) => column.map((value) => (value != null && value <= 0 ? null : value)))];
  }

  options(width, height) {
    const color = (name) => {
      this.canvas.style.color = `var(${name})`; // as the theme has it
      return getComputedStyle(this.canvas).color;
    };
    const axis = { stroke: color("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: color("--grid"), width: 1 } };
    const series = [{}], bands = [];
    const share = this.axis === "rate" && this.format === formatNumber ? 0.75 : 0.97; // a loss over rising rates diverges in the end
    for (const one of this.series) {
      const stroke = color(one.color);
      if (one.low) {
        const edge = { stroke: "transparent", points: { show: false } };
        bands.push({ series: [series.length + 1, series.length], fill: translucent(stroke, 0.16) });
        series.push(edge, { ...edge });
      }
      series.push({
        stroke: translucent(stroke, one.alpha ?? 1),
        width: one.width ?? 2,
        dash: one.dash,
        points: { show: (plot, number) => isMarked(plot.data[number], one.points), size: 6, fill: stroke, stroke },
      });
    }
    return {
      width,
      height,
      series,
      bands,
      legend: { show: false },
      padding: [8, this.axis === "time" ? 32 : 18, 0, 0], // room for half of the last label
      scales: { x: { time: false, auto: false, distr: this.axis === "rate" ? 3 : 1, range: (plot, low, high) => [low, high] }, y: this.log ? { distr: 3, range: (plot, low, high) => decades(low, high) } : { range: (plot, low, high) => this.limits ?? padded(low, withoutOutliers(plot, low, high, share)) } },
      axes: [
        { ...axis, size: 24, gap: 4, space: 64, label: AXIS_LABELS[this.axis], labelFont: axis.font, labelSize: 14, labelGap: 0, ...(this.axis === "step" && { incrs: WHOLE }), values: (plot, ticks) => ticks.map((tick) => TICKS[this.axis](tick)) },
        { ...axis, size: (plot, texts) => Math.max(54, 12 + 7 * Math.max(0, ...(texts ?? []).map((text) => text?.length ?? 0))), gap: 6, values: (plot, ticks, number, space, interval) => ticks.map((tick) => (tick == null ? "" : this.format(tick, interval))) },
      ],
      cursor: { sync: { key: this.sync }, points: { size: 7 }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        setSelect: [(plot) => this.zoom(plot)],
        setScale: [(plot, key) => key === "x" && !this.zooming && this.isReset(plot) && this.onZoom(null)],
      },
    };
  }

  isReset(plot) {
    const { min, max } = plot.scales.x;
    return this.range != null && min <= plot.data[0][0] && max >= plot.data[0].at(-1);
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const [first, last] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom([first, last]);
  }

  /** Zoom and move by keys, as dragging does; half of the seen range at a time. */
  press(event) {
    const change = KEYS[event.key];
    if (!change || event.ctrlKey || event.metaKey || event.altKey || !this.plot) return;
    event.preventDefault();
    event.stopPropagation(); // a notebook has keys of its own
    const { min, max } = this.plot.scales.x, [first, last] = this.ends;
    const range = [Math.max(first, min + change[0] * (max - min)), Math.min(last, max + change[1] * (max - min))];
    if (range[0] < range[1]) this.onZoom(range[0] <= first && range[1] >= last ? null : range);
  }

  /** The values under the cursor in the heading; the latest ones without a cursor. */
  showValues(index) {
    if (!this.plot) return;
    const parts = this.series.flatMap((one, number) => {
      if (one.quiet) return [];
      const column = this.measured[number];
      const isLost = index == null ? one.lost : column[index] === null; // at this step itself the value is no number
      const value = nearest(column, index ?? column.length - 1);
      return value == null && !isLost ? [] : [el("span", {}, swatch(one.label ? one.color : null), one.label ? el("span", { class: "label" }, one.label) : null, el("b", {}, isLost ? UNKNOWN : this.format(value)))];
    });
    const x = index == null ? null : this.plot.data[0][index];
    const where = x == null ? null : el("span", { class: "where" }, PLACES[this.axis](x));
    fill(this.values, where, ...parts.slice(0, MAX_VALUES));
  }
}

/** Whether each value is marked: of evaluations, if they are few, and of any line with one value, which would be invisible. */
function isMarked(values, areEvaluations) {
  const number = values.filter((value) => value != null).length;
  return number === 1 || (areEvaluations && number < FEW_POINTS);
}

/** The ends of the x axis of all series. */
function ends(series) {
  const xs = series.flatMap(({ x }) => [x[0], x.at(-1)]).filter((value) => value != null);
  return [Math.min(...xs), Math.max(...xs)];
}

/** A dot in a colour of the style sheet. */
export function swatch(color) {
  if (!color) return null;
  const dot = el("i", { class: "swatch" });
  dot.style.background = `var(${color})`;
  return dot;
}

function nearest(column, index) {
  for (let i = index; i >= 0; i--) if (column[i] != null) return column[i];
  return null;
}

/** The upper end of an axis that few much higher values, above a `share` of all, do not decide on: they are cut off. */
function withoutOutliers(plot, low, high, share) {
  const values = plot.data.slice(1).flat().filter((value) => value != null).sort((a, b) => a - b);
  const most = values[Math.floor(share * (values.length - 1))];
  return values.length >= 20 && high - low > 4 * (most - low) && most > low ? most + (most - low) / 4 : high;
}

/** The ends of a logarithmic axis. uPlot's are the same for values that only rounding tells apart, such as a smoothed 0.01. */
function decades(low, high) {
  if (low == null) return [null, null];
  const [bottom, top] = uPlot.rangeLog(low, high, 10, false);
  return bottom < top ? [bottom, top] : [bottom / 10, 10 * top];
}

function padded(low, high) {
  if (low == null || high == null) return [0, 1];
  const span = high - low > 1e-9 * Math.abs(high) ? high - low : 0; // otherwise only rounding tells the values apart
  const space = (span || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - space < 0 ? 0 : low - space, high + space];
}

function compact(value) {
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

function translucent(color, alpha) {
  return alpha === 1 ? color : `color-mix(in srgb, ${color} ${100 * alpha}%, transparent)`;
}
