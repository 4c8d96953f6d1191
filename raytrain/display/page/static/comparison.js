// Several runs side by side: their curves in one chart, a table, and parallel coordinates of what differs.

import { Chart, swatch } from "./chart.js";
import { isLost, smooth } from "./curves.js";
import { bestOf, el, fill, formatDollars, formatMetric, formatNumber, formatOption, refill } from "./format.js";
import { ParallelCoordinates } from "./parallel_coordinates.js";

const NUM_COLORS = 8;
const ACCURACY = { name: "accuracy", is_lower_better: false, is_fraction: true };

export class Comparison {
  /** `select(name)` shows the page of one run below; null shows none. */
  constructor(api, select) {
    this.api = api;
    this.select = select;
    this.names = []; // of all runs, in the order in which they are shown
    this.runs = new Map(); // name → { view, color, config }, of those that are known
    this.selected = null;
    this.metric = null; // that all runs are compared by
    this.charts = ["Training loss", ""].map((title) => new Chart({ title, sync: "comparison", onZoom: (range) => { this.range = range; this.draw(); } }));
    this.compareBy(ACCURACY);
    this.range = null;
    this.sweepDollars = {}; // of all trials of a sweep together, by its name
    this.title = el("h1");
    this.facts = el("p", { class: "facts" });
    this.body = el("tbody");
    this.head = el("tr");
    this.coordinates = new ParallelCoordinates((name) => this.choose(name));
    this.element = el(
      "article",
      { class: "comparison" },
      el("header", {}, this.title, this.facts),
      el("div", { class: "charts large" }, ...this.charts.map((chart) => chart.element)),
      el("div", { class: "scroll" }, el("table", { class: "runs cards" }, el("thead", {}, this.head), this.body)),
      this.coordinates.element,
    );
  }

  /** Take what a message said about the run that `view` shows. */
  apply(message, view) {
    if (!this.runs.has(message.run)) {
      if (!this.names.includes(message.run)) this.names.push(message.run);
      const place = (name) => this.names.indexOf(name);
      const run = { view, color: `--run-${place(message.run) % NUM_COLORS}`, config: null, metric: null };
      this.runs = new Map([...this.runs, [message.run, run]].sort(([a], [b]) => place(a) - place(b)));
      this.api.documents(message.run).then(({ config, metric, not_compared }) => { run.config = compared(config, not_compared); run.metric = metric; this.schedule(); }).catch(() => {});
    }
    this.schedule();
  }

  /** Show what the machines of a sweep have cost so far: those that several trials train on count once. */
  showCost(sweepDollars) {
    this.sweepDollars = sweepDollars;
    this.schedule();
  }

  /** Draw once for all messages that arrive together. */
  schedule() {
    this.pending ??= requestAnimationFrame(() => { this.pending = null; this.draw(); });
  }

  /** Compare by the metric of --best if that is the same of all runs, otherwise by the accuracy. */
  compareBy(metric) {
    if (metric.name === this.metric?.name) return;
    this.metric = metric;
    this.charts[1].retitle({ title: `Validation ${metric.name.replaceAll("_", " ")}`, format: (value, interval) => formatMetric(metric, value, interval) });
  }

  draw() {
    const metrics = new Map([...this.runs.values()].filter(({ metric }) => metric).map(({ metric }) => [metric.name, metric]));
    this.compareBy(metrics.size === 1 ? [...metrics.values()][0] : ACCURACY);
    this.showHeading();
    const shown = [this.series("step", "loss"), this.series("evaluation", this.metric.name)];
    const ends = shown.flat().flatMap(({ x }) => [x[0], x.at(-1)]); // of both charts, whose cursors move together
    const whole = ends.length ? [Math.min(...ends), Math.max(...ends)] : null;
    shown.forEach((series, number) => this.charts[number].show(series, { range: this.range, whole }));
    const options = this.differing();
    this.coordinates.show([...this.runs].map(([name, run]) => ({ name, values: Object.fromEntries(options.map((option) => [option, run.config?.[option]])), score: this.best(run.view) })), options, this.metric);
    this.drawTable(options);
  }

  /** The name that all runs begin with, which is that of their sweep, and how many of them are in which state. */
  showHeading() {
    const prefixes = new Set([...this.runs.keys()].map((name) => name.match(/^(.+)-\d+$/)?.[1] ?? name));
    const count = this.runs.size === 1 ? "1 run" : `${this.runs.size} runs`;
    fill(this.title, prefixes.size === 1 ? [...prefixes][0] : `${count} side by side`);
    const states = new Map();
    for (const { view } of this.runs.values()) states.set(view.state.status, (states.get(view.state.status) ?? 0) + 1);
    const counts = [...states].map(([status, number]) => (states.size === 1 ? status : `${number} ${status}`)).join(", ");
    const costs = Object.entries(this.sweepDollars).map(([name, dollars]) => `${formatDollars(dollars)} for ${prefixes.size === 1 ? "the whole sweep" : `all of ${name}`}`);
    const sign = this.metric.is_lower_better ? -1 : 1;
    const [best] = [...this.runs].filter(([, { view }]) => this.best(view) !== null).sort(([, a], [, b]) => sign * (this.best(b.view) - this.best(a.view)));
    const leader = best && `best ${best[0]}, ${this.metric.name.replaceAll("_", " ")} ${formatMetric(this.metric, this.best(best[1].view))}`;
    fill(this.facts, [prefixes.size === 1 ? count : null, counts, leader, ...costs].filter(Boolean).join(" · "));
  }

  series(kind, metric) {
    return [...this.runs].flatMap(([name, { view, color }]) => {
      const curves = view.curves[kind], curve = curves.get(metric);
      if (!curve) return [];
      const y = kind === "step" ? smooth(curves.step, curve.mean, 0.5) : curve.mean;
      const faded = this.selected && this.selected !== name;
      return [{ label: name, x: curves.step, y, measured: curve.mean, lost: isLost(kind === "step" ? view.state.latest : view.state.evaluation, metric), color, points: kind === "evaluation", alpha: faded ? 0.25 : 1, width: this.selected === name ? 3 : 1.5 }];
    });
  }

  /** The options whose values differ between the runs. */
  differing() {
    const configs = [...this.runs.values()].map(({ config }) => config).filter(Boolean);
    const names = [...new Set(configs.flatMap(Object.keys))];
    return names.filter((name) => new Set(configs.filter((config) => name in config).map((config) => JSON.stringify(config[name]))).size > 1);
  }

  drawTable(options) {
    fill(this.head, ...["Run", "Status", "Progress", ...options.map((name) => name.replaceAll("_", "-")), this.bestTitle(), "Images/s", ...(this.hasCosts() ? ["Cost"] : [])].map((name) => el("th", { scope: "col" }, name)));
    const sign = this.metric.is_lower_better ? -1 : 1;
    const score = ({ view }) => { const value = this.best(view); return value === null ? -Number.MAX_VALUE : sign * value; };
    const order = [...this.runs].sort(([, a], [, b]) => score(b) - score(a));
    refill(this.body, ...order.map(([name, run]) => this.row(name, run, options)));
  }

  row(name, { view, color, config }, options) {
    const { state } = view;
    const open = el("button", { type: "button", class: "link", click: () => this.choose(name) }, swatch(color), name);
    return el(
      "tr",
      { "aria-selected": String(this.selected === name) },
      el("th", { scope: "row", class: "name" }, open),
      el("td", { class: "state" }, el("span", { class: "pill", "data-status": state.status }, state.status)),
      el("td", { class: "progress", "data-title": "Progress" }, el("progress", { max: 1, value: state.step / state.num_steps, "aria-label": `progress of ${name}` })),
      ...options.map((option) => el("td", { "data-title": option.replaceAll("_", "-") }, typeof config?.[option] === "number" ? formatNumber(config[option]) : formatOption(config?.[option]))),
      el("td", { class: "accuracy", "data-title": this.bestTitle() }, formatMetric(this.metric, this.best(view))),
      el("td", { "data-title": "Images/s" }, formatNumber(medianSpeed(view.curves.step))),
      this.hasCosts() ? el("td", { "data-title": "Cost" }, formatDollars(state.dollars)) : null,
    );
  }

  /** True if a run knows what it has cost, by --price. */
  hasCosts() {
    return [...this.runs.values()].some(({ view }) => view.state.dollars != null);
  }

  /** The best value that was measured on the validation images. */
  best(view) {
    const { mean = [], low = mean, high = mean } = view.curves.evaluation.get(this.metric.name) ?? {};
    return bestOf(this.metric, this.metric.is_lower_better ? low : high);
  }

  bestTitle() {
    return `Best ${this.metric.name.replaceAll("_", " ")}`;
  }

  choose(name) {
    this.selected = this.selected === name ? null : name;
    this.select(this.selected);
    this.draw();
  }

  redraw() {
    for (const chart of this.charts) chart.rebuild();
    this.draw();
  }
}

/** The median images/s after the first tenth of the steps, as `raytrain compare` has it; null if none is known. */
function medianSpeed(curves) {
  const { mean = [] } = curves.get("images_per_s") ?? {};
  const speeds = mean.filter((speed, i) => speed != null && curves.step[i] > 0.1 * curves.step.at(-1)).sort((a, b) => a - b);
  const half = speeds.length / 2;
  return speeds.length ? (speeds[Math.ceil(half) - 1] + speeds[Math.floor(half)]) / 2 : null;
}

/** The options of a run without those that change nothing: where it is, and what its own loop does not use. */
function compared(config, left_out) {
  return config && Object.fromEntries(Object.entries(config).filter(([name]) => !left_out.includes(name)));
}
