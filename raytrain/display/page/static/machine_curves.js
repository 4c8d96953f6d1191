// The use of the workers' machines over the time of a run: a chart for each kind, a line for each worker or node.

import { Chart } from "./chart.js";
import { el, formatNumber, formatPercent } from "./format.js";

const MAX_LINES = 8;
const CHARTS = [
  { name: "images_per_s", title: "Images/s", format: formatNumber, limits: null },
  { name: "data_wait_fraction", title: "Waiting for data" },
  { name: "cpu_fraction", title: "CPU", perNode: true },
  { name: "memory_fraction", title: "Memory", perNode: true },
  { name: "shared_memory_fraction", title: "Shared memory", perNode: true },
  { name: "object_store_fraction", title: "Object store", perNode: true },
  { name: "gpu_fraction", title: "GPU use" },
  { name: "gpu_memory_fraction", title: "GPU memory" },
];

export class MachineCurves {
  constructor(sync) {
    this.sync = sync;
    this.charts = new Map();
    this.range = null;
    this.grid = el("div", { class: "charts narrow" });
    this.element = el("section", { hidden: true }, el("h2", {}, "Machines over time"), this.grid);
  }

  /** Show `elapsed_s`, the times, and `workers`, each with its `rank`, `node` and `values` by name. */
  show(history) {
    this.history = history;
    this.element.hidden = history.elapsed_s.length < 2;
    if (!this.element.hidden) for (const kind of CHARTS) this.draw(kind);
  }

  draw(kind) {
    const { elapsed_s: x, workers } = this.history;
    const measured = workers.filter(({ values }) => values[kind.name]?.some((value) => value != null));
    const lines = kind.perNode ? firstOfEachNode(measured) : measured;
    if (!lines.length) return;
    if (!this.charts.has(kind.name)) this.add(kind);
    const series = lines.slice(0, MAX_LINES).map(({ rank, node, values }, i) => ({
      label: lines.length === 1 ? "" : kind.perNode ? node : `worker ${rank}`, x, y: values[kind.name], color: `--run-${i}`,
    }));
    this.charts.get(kind.name).show(series, { axis: "time", range: this.range });
  }

  add({ name, title, format = formatPercent, limits = [0, 1.03] }) {
    const chart = new Chart({ title, format, limits, sync: this.sync, onZoom: (range) => this.zoom(range) });
    this.charts.set(name, chart);
    this.grid.append(chart.element);
  }

  zoom(range) {
    this.range = range;
    this.show(this.history);
  }

  /** Draw everything anew, as after a change of the theme. */
  redraw() {
    for (const chart of this.charts.values()) chart.rebuild();
  }
}

/** The use of a node is the same whichever of its workers has measured it. */
function firstOfEachNode(workers) {
  return workers.filter(({ node }, i) => workers.findIndex((other) => other.node === node) === i);
}
