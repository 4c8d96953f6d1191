// Several runs side by side: their curves in one chart, a table, and parallel coordinates of what differs.

import { Chart, swatch } from "./chart.js";
import { smooth } from "./curves.js";
import { el, fill, formatNumber, formatOption, formatPercent } from "./format.js";
import { ParallelCoordinates } from "./parallel_coordinates.js";

const NUM_COLORS = 8;
const CURVES = [
  { title: "Training loss", kind: "step", name: "loss" },
  { title: "Validation accuracy", kind: "evaluation", name: "accuracy", format: formatPercent },
];
const NOT_COMPARED = new Set(["name", "storage", "resume", "address", "track", "tag", "note"]); // where a run is, not what it does

export class Comparison {
  /** `select(name)` shows the page of one run below; null shows none. */
  constructor(api, select) {
    this.api = api;
    this.select = select;
    this.runs = new Map(); // name → { view, color, config }
    this.selected = null;
    this.charts = CURVES.map((curve) => new Chart({ title: curve.title, format: curve.format ?? formatNumber, sync: "comparison", onZoom: (range) => { this.range = range; this.draw(); } }));
    this.range = null;
    this.body = el("tbody");
    this.head = el("tr");
    this.coordinates = new ParallelCoordinates((name) => this.choose(name));
    this.element = el(
      "article",
      { class: "comparison" },
      el("div", { class: "charts large" }, ...this.charts.map((chart) => chart.element)),
      this.coordinates.element,
      el("div", { class: "scroll" }, el("table", { class: "runs cards" }, el("thead", {}, this.head), this.body)),
    );
  }

  /** Take what a message said about the run that `view` shows. */
  apply(message, view) {
    if (!this.runs.has(message.run)) {
      const run = { view, color: `--run-${this.runs.size % NUM_COLORS}`, config: null };
      this.runs.set(message.run, run);
      this.api.documents(message.run).then(({ config, unused_options }) => { run.config = used(config, unused_options); this.schedule(); }).catch(() => {});
    }
    this.schedule();
  }

  /** Draw once for all messages that arrive together. */
  schedule() {
    this.pending ??= requestAnimationFrame(() => { this.pending = null; this.draw(); });
  }

  draw() {
    CURVES.forEach(({ kind, name }, i) => this.charts[i].show(this.series(kind, name), { range: this.range }));
    const options = this.differing();
    this.coordinates.show([...this.runs].map(([name, run]) => ({ name, values: Object.fromEntries(options.map((option) => [option, run.config?.[option]])), score: best(run.view) })), options);
    this.drawTable(options);
  }

  series(kind, metric) {
    return [...this.runs].flatMap(([name, { view, color }]) => {
      const curves = view.curves[kind], curve = curves.get(metric);
      if (!curve) return [];
      const y = kind === "step" ? smooth(curves.step, curve.mean, 0.5) : curve.mean;
      const faded = this.selected && this.selected !== name;
      return [{ label: name, x: curves.step, y, color, points: kind === "evaluation", alpha: faded ? 0.25 : 1, width: this.selected === name ? 3 : 1.5 }];
    });
  }

  /** The options whose values differ between the runs. */
  differing() {
    const configs = [...this.runs.values()].map(({ config }) => config).filter(Boolean);
    const names = [...new Set(configs.flatMap(Object.keys))].filter((name) => !NOT_COMPARED.has(name));
    return names.filter((name) => new Set(configs.filter((config) => name in config).map((config) => JSON.stringify(config[name]))).size > 1);
  }

  drawTable(options) {
    fill(this.head, ...["Run", "Status", "Progress", ...options.map((name) => name.replaceAll("_", "-")), "Best accuracy", "Images/s"].map((name) => el("th", { scope: "col" }, name)));
    const order = [...this.runs].sort(([, a], [, b]) => (best(b.view) ?? -1) - (best(a.view) ?? -1));
    fill(this.body, ...order.map(([name, run]) => this.row(name, run, options)));
  }

  row(name, { view, color, config }, options) {
    const { state } = view;
    const open = el("button", { type: "button", class: "link", click: () => this.choose(name) }, swatch(color), name);
    return el(
      "tr",
      { "aria-selected": String(this.selected === name) },
      el("th", { scope: "row", class: "name" }, open),
      el("td", { class: "state" }, el("span", { class: "pill", "data-status": state.status }, state.status)),
      el("td", { class: "progress", "data-title": "Progress" }, el("progress", { max: 1, value: state.step / state.num_steps })),
      ...options.map((option) => el("td", { "data-title": option.replaceAll("_", "-") }, typeof config?.[option] === "number" ? formatNumber(config[option]) : formatOption(config?.[option]))),
      el("td", { class: "accuracy", "data-title": "Best accuracy" }, formatPercent(best(view))),
      el("td", { "data-title": "Images/s" }, formatNumber(state.latest?.images_per_s)),
    );
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

/** The options of a run without those that its own loop does not use. */
function used(config, unused) {
  return config && Object.fromEntries(Object.entries(config).filter(([name]) => !unused.includes(name)));
}

/** The best accuracy on the validation images. */
function best(view) {
  const { mean = [], high = mean } = view.curves.evaluation.get("accuracy") ?? {};
  const known = high.filter((value) => value != null);
  return known.length ? Math.max(...known) : null;
}
