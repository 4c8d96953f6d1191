// The list of all runs: searched, sorted by any column, those of a sweep grouped, each a link to the page of the run.

import { bestOf, el, fill, formatDate, formatDollars, formatDuration, formatMetric, formatModel, formatNumber, formatRate, refill, svg, UNKNOWN } from "./format.js";

const REFRESH_MS = 3000;
const WIDTH = 90, HEIGHT = 22;

// The columns: heading, class, content, and what they are sorted by, the largest first. A phone shows the cells of a
// run below each other, with the heading before the content.
const COLUMNS = [
  { title: "State", name: "state", cell: state, key: ({ status }) => status, ascending: true },
  { title: "Best", name: "accuracy", cell: bestCell, key: score },
  { title: "", name: "curve", cell: sparkline },
  { title: "Model", name: "model", cell: (run) => el("span", { title: network(run) }, formatModel(network(run))), key: (run) => network(run) ?? "", ascending: true },
  { title: "Epochs", name: "epochs", cell: epochs, key: ({ epoch }) => epoch },
  { title: "Rate", name: "rate", cell: (run) => (looksForRate(run) ? "rising" : formatRate(run.learning_rate)), key: ({ learning_rate }) => Number.parseFloat(learning_rate) },
  { title: "Batch", name: "batch", cell: ({ batch_size }) => batch_size ?? UNKNOWN, key: ({ batch_size }) => Number.parseFloat(batch_size) },
  { title: "Optimizer", name: "optimizer", cell: ({ optimizer }) => optimizer ?? UNKNOWN, key: ({ optimizer }) => optimizer ?? "", ascending: true },
  { title: "Time", name: "time", cell: ({ seconds }) => formatDuration(seconds), key: ({ seconds }) => seconds },
  { title: "Cost", name: "cost", cell: ({ dollars }) => formatDollars(dollars), key: ({ dollars }) => dollars },
  { title: "Last active", name: "date", cell: (run) => el("time", { datetime: run.heartbeat_at, title: run.heartbeat_at }, formatDate(run.heartbeat_at)), key: ({ heartbeat_at }) => Date.parse(heartbeat_at) },
];
const BEST = COLUMNS[1]; // of the metric that all runs are compared by; if these are several, each cell names its own
const COST = COLUMNS.find(({ name }) => name === "cost"); // shown if a run has a price
const NAME = { title: "Run", name: "name", key: ({ name }) => name, ascending: true };

export class Home {
  /** `address(...names)` is where runs are shown. */
  constructor(api, address) {
    this.api = api;
    this.address = address;
    this.runs = [];
    this.answer = ""; // of the server, as it was last
    this.opened = new Set(); // groups
    this.chosen = new Set(); // runs to compare
    this.order = { column: COLUMNS.at(-1), descending: true };
    this.search = el("input", { type: "search", placeholder: "Search name, model, recipe, state, tag, note", "aria-label": "search", input: () => this.draw() });
    this.compare = el("a", { class: "button", hidden: true });
    this.body = el("tbody");
    this.head = el("tr");
    this.note = el("p", { class: "note" });
    this.leftOut = el("ul", { class: "left-out" });
    this.element = el(
      "article",
      { class: "home" },
      el("div", { class: "heading" }, el("h1", {}, "Runs"), this.note, this.compare, this.search),
      el("table", { class: "runs cards" }, el("thead", {}, this.head), this.body),
      this.leftOut,
    );
    this.refresh();
  }

  async refresh() {
    for (;;) {
      try {
        const answer = await this.api.runs();
        if (JSON.stringify(answer) !== this.answer) {
          this.answer = JSON.stringify(answer);
          this.runs = answer.runs;
          const metrics = new Set(answer.runs.map(({ metric }) => metric.name));
          BEST.title = metrics.size > 1 ? "Best" : `Best ${[...metrics][0] ?? "accuracy"}`.replaceAll("_", " ");
          const groups = new Set(answer.runs.map(({ group }) => group)); // a sweep has a folder of its own beside its runs
          const count = answer.runs.filter(({ name }) => !groups.has(name)).length;
          fill(this.note, count ? `${count === 1 ? "1 run" : `${count} runs`} in ${answer.storage}` : `There are no runs in ${answer.storage} yet.`);
          fill(this.leftOut, ...answer.left_out.map((line) => el("li", {}, line)));
          this.draw();
        }
      } catch (error) {
        this.answer = "";
        fill(this.note, error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    }
  }

  draw() {
    this.drawHead();
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.runs.filter((run) => words.every((word) => searchable(run).includes(word)));

    // A sweep is one line, with what its best run has reached; a search shows the runs themselves.
    const groups = new Map();
    if (!words.length) for (const run of found) if (run.group) groups.set(run.group, [...(groups.get(run.group) ?? []), run]);
    const leaders = new Map([...groups].map(([name, runs]) => [runs.reduce((a, b) => ((score(b) ?? -Infinity) > (score(a) ?? -Infinity) ? b : a)), name]));
    const single = found.filter((run) => !groups.has(run.group) && !groups.has(run.name));
    const sweeps = [...leaders].map(([best, name]) => this.sweep(name, best, groups.get(name)));
    const lines = this.sorted([...single, ...sweeps]).flatMap((run) => (run.runs ? this.group(run) : [this.row(run)]));
    refill(this.body, ...lines);
  }

  drawHead() {
    const heading = (column) => {
      if (!column.key) return el("th", { scope: "col", class: column.name }, column.title);
      const isSorted = this.order.column === column;
      const direction = isSorted ? (this.order.descending ? "descending" : "ascending") : "none";
      const sort = () => {
        this.order = { column, descending: isSorted ? !this.order.descending : !column.ascending };
        this.draw();
      };
      return el("th", { scope: "col", class: column.name, "aria-sort": direction }, el("button", { type: "button", class: "link", click: sort }, column.title));
    };
    refill(this.head, el("th", { class: "choice" }), heading(NAME), ...this.columns().map(heading));
  }

  columns() {
    return COLUMNS.filter((column) => column !== COST || this.runs.some(({ dollars }) => dollars != null));
  }

  /** The runs in the chosen order; those whose value is unknown come last. */
  sorted(runs) {
    const { column, descending } = this.order;
    const known = (value) => value !== undefined && value !== null && !Number.isNaN(value);
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    return [...runs].sort((first, second) => {
      const a = column.key(first), b = column.key(second);
      if (known(a) !== known(b)) return known(a) ? -1 : 1;
      return known(a) ? (descending ? -1 : 1) * compare(a, b) : 0;
    });
  }

  /** What a line says of a sweep: what its `best` run has reached, but its own state, time and cost, as runs overlap. */
  sweep(name, best, runs) {
    const { status, step, num_steps, seconds, dollars, heartbeat_at } = this.runs.find((run) => run.name === name);
    const training = runs.some((run) => run.status === "running" || run.status === "starting");
    const own = { name, step, num_steps, seconds, dollars, heartbeat_at, status: training ? "running" : status };
    return { ...best, ...own, note: null, tags: [], problems: [], best, runs };
  }

  /** A line for all runs of a sweep and, if it is opened, one for each. */
  group(sweep) {
    const { name, best, runs } = sweep;
    const open = this.opened.has(name);
    const toggle = () => {
      open ? this.opened.delete(name) : this.opened.add(name);
      this.draw();
    };
    const button = el("button", { type: "button", class: "quiet toggle", "aria-expanded": String(open), "aria-label": `runs of ${name}`, click: toggle }, open ? "▾" : "▸");
    const about = `${runs.length === 1 ? "1 run" : `${runs.length} runs`}${score(best) === null ? "" : `, best ${best.name}`}`;
    const line = this.row(sweep, { choice: button, about });
    return [line, ...(open ? this.sorted(runs).map((run) => this.row(run, { member: true })) : [])];
  }

  row(run, { choice = this.choice(run), about = describe(run), member = false } = {}) {
    const link = el("a", { href: this.address(run.name) }, run.name);
    const problems = run.problems.map((problem) => el("span", { class: "problem" }, problem));
    const name = el("th", { scope: "row", class: "name" }, link, about ? el("span", { class: "about" }, about) : null, ...problems);
    const cells = this.columns().map((column) => el("td", { class: column.name, "data-title": column.title }, column.cell(run)));
    return el("tr", { class: member ? "member" : null }, el("td", { class: "choice" }, choice), name, ...cells);
  }

  /** A box that takes the run into a comparison. */
  choice({ name }) {
    const box = el("input", { type: "checkbox", "aria-label": `compare ${name}`, change: () => { box.checked ? this.chosen.add(name) : this.chosen.delete(name); this.showCompare(); } });
    box.checked = this.chosen.has(name);
    return box;
  }

  showCompare() {
    this.compare.hidden = this.chosen.size < 2;
    this.compare.href = this.address(...this.chosen);
    fill(this.compare, `Compare ${this.chosen.size} runs`);
  }
}

/** The best value of the metric of a run, null if none is known. */
function best({ metric, best_value, validation_accuracy }) {
  return bestOf(metric, metric.name === "accuracy" ? [best_value, validation_accuracy] : [best_value]);
}

/** A number that is larger for a better run; null if none is known. */
function score(run) {
  const value = best(run);
  return value === null ? null : run.metric.is_lower_better ? -value : value;
}

function bestCell(run) {
  const value = best(run), name = run.metric.name.replaceAll("_", " ");
  if (value === null) return UNKNOWN;
  return BEST.title === "Best" ? `${name} ${formatMetric(run.metric, value)}` : formatMetric(run.metric, value);
}

/** The network of the options, or the loop that has built one of its own. */
function network({ model, loop }) {
  return model ?? loop;
}

function searchable({ name, recipe, model, loop, status, tags, note, optimizer }) {
  return [name, recipe, model, loop, status, optimizer, note, ...tags].join(" ").toLowerCase();
}

/** What the author says of a run: its tags and its note. */
function describe(run) {
  return [looksForRate(run) ? "looks for a learning rate" : null, run.tags.join(" "), run.note].filter(Boolean).join(" · ");
}

function looksForRate({ schedule }) {
  return schedule?.startsWith("rising") ?? false;
}

function state(run) {
  const isActive = run.status === "running" || run.status === "starting";
  const progress = isActive && run.num_steps ? el("progress", { max: 1, value: run.step / run.num_steps, title: `step ${formatNumber(run.step)} of ${formatNumber(run.num_steps)}`, "aria-label": `progress of ${run.name}` }) : null;
  return el("div", {}, el("span", { class: "pill", "data-status": run.status }, run.status), progress);
}

function epochs({ epoch, num_epochs, epochs }) {
  return num_epochs ? `${formatNumber(epoch)} of ${formatNumber(num_epochs)}` : formatNumber(epochs);
}

/** What a run's evaluations measured, as a small line; a dot if there is one. */
function sparkline({ metric, measured }) {
  const known = measured.filter((value) => value != null);
  if (!known.length) return null;
  const low = Math.min(...known), span = Math.max(...known) - low || 1;
  const points = known.map((value, i) => [2 + ((WIDTH - 4) * i) / Math.max(1, known.length - 1), HEIGHT - 3 - (HEIGHT - 6) * (known.length > 1 ? (value - low) / span : 0.5)]);
  const about = `from ${formatMetric(metric, known[0])} to ${formatMetric(metric, known.at(-1))}`;
  return svg(
    "svg",
    { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "sparkline", role: "img", "aria-label": about },
    points.length > 1 ? svg("polyline", { points: points.map((point) => point.join(",")).join(" ") }) : null,
    svg("circle", { cx: points.at(-1)[0], cy: points.at(-1)[1], r: 2 }),
  );
}
