// The list of all runs: searched, sweeps and studies grouped, each a link to the page of the run.

import { el, fill, formatPercent, svg } from "./format.js";

const REFRESH_MS = 3000;
const WIDTH = 90, HEIGHT = 22;

export class Home {
  /** `address(name)` is where a run is shown. */
  constructor(api, address) {
    this.api = api;
    this.address = address;
    this.runs = [];
    this.opened = new Set(); // groups
    this.search = el("input", { type: "search", placeholder: "name, recipe, status or tag", "aria-label": "search", input: () => this.draw() });
    this.body = el("tbody");
    this.note = el("p", { class: "note" });
    const head = ["Run", "Recipe", "Status", "Progress", "Last accuracy", "Accuracies", "Tags"].map((name) => el("th", { scope: "col" }, name));
    this.element = el("article", { class: "home" }, this.search, this.note, el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, ...head)), this.body)));
    this.refresh();
  }

  async refresh() {
    for (;;) {
      try {
        const { runs, storage } = await this.api.runs();
        this.runs = runs;
        fill(this.note, runs.length ? `${runs.length} runs in ${storage}` : `There are no runs in ${storage} yet.`);
        this.draw();
      } catch (error) {
        fill(this.note, error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    }
  }

  draw() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.runs.filter((run) => words.every((word) => [run.name, run.recipe, run.status, ...run.tags].join(" ").toLowerCase().includes(word)));
    const rows = [];
    const groups = new Set();
    for (const run of found) {
      if (!run.group || words.length) rows.push(row(run, this.address));
      else if (!groups.has(run.group)) {
        groups.add(run.group);
        rows.push(...this.group(run.group, found.filter(({ group }) => group === run.group)));
      }
    }
    fill(this.body, ...rows.filter((each) => !groups.has(each.dataset.name)));
  }

  /** A row for all runs of a sweep or a study and, if it is opened, one for each. */
  group(name, runs) {
    const best = runs.reduce((a, b) => (score(b) > score(a) ? b : a));
    const about = `${runs.length} runs${score(best) < 0 ? "" : `, best ${best.name}`}`;
    const training = runs.filter(({ status }) => status === "running" || status === "starting").length;
    const open = this.opened.has(name);
    const toggle = el("button", { type: "button", class: "quiet", "aria-expanded": String(open), click: () => { open ? this.opened.delete(name) : this.opened.add(name); this.draw(); } }, open ? "▾" : "▸");
    const line = row({ ...best, name, status: training ? "running" : best.status, tags: [about] }, this.address, toggle);
    line.dataset.name = "";
    return [line, ...(open ? runs.map((run) => row(run, this.address, "  ")) : [])];
  }
}

/** The best accuracy of a run, -1 if none is known. */
function score(run) {
  return Math.max(-1, run.test_accuracy ?? -1, ...run.accuracies.map((value) => value ?? -1));
}

function row(run, address, before = null) {
  const progress = run.num_steps ? el("progress", { max: 1, value: run.step / run.num_steps, title: `step ${run.step} of ${run.num_steps}` }) : null;
  const line = el(
    "tr",
    {},
    el("th", { scope: "row" }, before, el("a", { href: address(run.name) }, run.name)),
    el("td", {}, run.recipe),
    el("td", {}, el("span", { class: "pill", "data-status": run.status }, run.status)),
    el("td", {}, progress),
    el("td", {}, formatPercent(run.test_accuracy ?? run.accuracies.at(-1))),
    el("td", {}, sparkline(run.accuracies)),
    el("td", {}, run.tags.join(" ")),
  );
  line.dataset.name = run.name;
  return line;
}

/** The accuracies of a run's evaluations as a small line; a dot if there is one. */
function sparkline(values) {
  const known = values.filter((value) => value != null);
  if (!known.length) return null;
  const low = Math.min(...known), span = Math.max(...known) - low || 1;
  const points = known.map((value, i) => [2 + ((WIDTH - 4) * i) / Math.max(1, known.length - 1), HEIGHT - 3 - ((HEIGHT - 6) * (value - low)) / span]);
  const about = `from ${formatPercent(known[0])} to ${formatPercent(known.at(-1))}`;
  return svg(
    "svg",
    { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "sparkline", role: "img", "aria-label": about },
    points.length > 1 ? svg("polyline", { points: points.map((point) => point.join(",")).join(" ") }) : null,
    svg("circle", { cx: points.at(-1)[0], cy: points.at(-1)[1], r: 2 }),
  );
}
