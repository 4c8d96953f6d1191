// What each worker makes of its machine: its speed, and the use of CPU, memory and GPU, now and over the time of the run.

import { Chart } from "./chart.js";
import { el, formatNumber, formatPercent, UNKNOWN } from "./format.js";

const COLUMNS = [
  ["Worker", ({ rank }) => rank],
  ["Node", ({ node }) => node],
  ["Images/s", (use) => formatNumber(use.images_per_s)],
  ["Waiting for data", (use) => formatPercent(use.data_wait_fraction)],
  ["CPU", (use) => meter(use.cpu_fraction, formatPercent(use.cpu_fraction))],
  ["Memory", (use) => memory(use.memory_bytes, use.memory_total_bytes)],
  ["Shared memory", (use) => memory(use.shared_memory_bytes, use.memory_total_bytes)],
];
const RAY_COLUMNS = [["Object store", (use) => memory(use.object_store_bytes, use.object_store_total_bytes)]];
const GPU_COLUMNS = [
  ["GPU", (use) => use.gpu ?? UNKNOWN],
  ["GPU use", (use) => meter(use.gpu_fraction, formatPercent(use.gpu_fraction))],
  ["GPU memory", (use) => memory(use.gpu_memory_bytes, use.gpu_memory_total_bytes)],
];

/** A section with a row for each worker; null if nothing has been measured. */
export function machineTable(workers) {
  if (!workers.length) return null;
  const onRay = workers.some((use) => use.object_store_total_bytes != null), onGpu = workers.some((use) => use.gpu != null);
  const columns = [...COLUMNS, ...(onRay ? RAY_COLUMNS : []), ...(onGpu ? GPU_COLUMNS : [])];
  const head = el("tr", {}, ...columns.map(([title]) => el("th", { scope: "col" }, title)));
  const rows = workers.map((use) => el("tr", {}, ...columns.map(([, value]) => el("td", {}, value(use)))));
  return el("section", {}, el("h2", {}, "Machines"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
}

function meter(fraction, text) {
  if (fraction == null) return UNKNOWN;
  return el("div", { class: "meter" }, el("progress", { max: 1, value: fraction, "aria-hidden": "true" }), text);
}

function memory(used, total) {
  return used == null || !total ? UNKNOWN : meter(used / total, `${gigabytes(used)} of ${gigabytes(total)} GB`);
}

function gigabytes(bytes) {
  return (bytes / 1e9).toFixed(1);
}

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
