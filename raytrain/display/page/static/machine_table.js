// What each worker makes of its machine: its speed, and the use of CPU, memory, object store and GPU.

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
