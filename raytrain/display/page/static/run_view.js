// The page of one run: heading, progress, stop, curves, and what the last evaluation showed.

import { Chart } from "./chart.js";
import { Curves, isLost, smooth } from "./curves.js";
import { evaluationView, suspiciousView } from "./evaluation_view.js";
import { el, fill, formatClock, formatDate, formatDollars, formatDuration, formatMetric, formatModel, formatNumber, formatOption, formatPercent, formatRate, printable } from "./format.js";
import { MachineCurves, machineTable } from "./machines.js";
import { StopPanel } from "./stop_panel.js";

const COLORS = { train: "--train", validation: "--validation" };
const KNOWN = {
  loss: { title: "Loss" },
  accuracy: { title: "Accuracy", format: formatPercent },
  learning_rate: { title: "Learning rate" },
  images_per_s: { title: "Images per second" },
  data_wait_fraction: { title: "Waiting for data", format: formatPercent },
  balanced_accuracy: { title: "Balanced accuracy", format: formatPercent },
  macro_f1: { title: "Macro F1", format: formatPercent },
  mean_average_precision: { title: "Mean average precision", format: formatPercent },
  auroc: { title: "AUROC" },
};
const AXES = { step: "over steps", time: "over time", rate: "over the learning rate" };
const FIRST = ["loss", "accuracy"];
const PICTURES_MS = 5_000; // until those of an evaluation are written
const READ_MACHINES_MS = 10_000; // as often as they are written
const ADVICE = / (Its last checkpoint is kept|It has no checkpoint yet): .*$/s; // of `failure_sentence`
const HIDDEN = new Set(["elapsed_s", "samples_seen"]);

export class RunView {
  /**
   * @param name the run's name.
   * @param api `curves(name, first, last)`, `documents(name)`, `machines(name)` and `stop(name)` return promises; a missing one hides
   *   what needs it.
   */
  constructor(name, api) {
    this.name = name;
    this.api = api;
    this.state = null;
    this.curves = { step: new Curves(), evaluation: new Curves() };
    this.zoomed = null;
    this.range = null;
    this.axis = "step";
    this.strength = 0.4;
    this.events = new Map();
    this.eventsGeneration = null;
    this.charts = new Map();
    this.machinesReadAt = -Infinity;
    this.build();
  }

  build() {
    this.title = el("h1", {}, this.name);
    this.status = el("span", { class: "pill", role: "status" });
    this.facts = el("p", { class: "facts" });
    this.options = el("dl", { class: "options", hidden: true });
    this.metric = { is_fraction: true }; // of --best
    this.suggestion = null;
    this.resume = null;
    this.bar = el("progress", { max: 1, value: 0, "aria-label": "progress" });
    this.progress = el("p", { class: "progress-text" });
    this.stopPanel = new StopPanel(() => this.api.stop(this.name), Boolean(this.api.stop));
    this.banner = el("div", { class: "banner", hidden: true });
    this.tiles = el("dl", { class: "tiles" });
    this.large = el("div", { class: "charts large" });
    this.small = el("div", { class: "charts" });
    this.eventList = el("ol", { class: "events" });
    this.machines = el("div", { class: "columns machines" });
    this.machineCurves = new MachineCurves(`machines of ${this.name}`);
    this.evaluation = el("div", { class: "evaluation" });
    this.config = el("div", { class: "config" });
    this.element = el(
      "article",
      { class: "run" },
      el("header", {}, el("div", { class: "heading" }, this.title, this.status, this.stopPanel.button), this.options, this.facts, this.bar, this.progress),
      this.stopPanel.element,
      this.banner,
      this.tiles,
      this.controls(),
      this.large,
      this.small,
      this.machines,
      this.machineCurves.element,
      this.evaluation,
      el("div", { class: "columns" }, el("section", {}, el("h2", {}, "Events"), this.eventList), this.config),
    );
  }

  controls() {
    this.axisButton = el("button", { type: "button", click: () => this.switchAxis() }, AXES[this.axis]);
    const slider = el("input", { type: "range", min: 0, max: 1, step: 0.05, value: this.strength, "aria-label": "smoothing" });
    slider.addEventListener("input", () => { this.strength = Number(slider.value); this.draw(); });
    this.reset = el("button", { type: "button", hidden: true, click: () => this.zoom(null) }, "show all");
    return el("div", { class: "controls" }, el("label", {}, "smoothing ", slider), this.axisButton, this.reset, el("span", { class: "hint" }, "drag in a chart to zoom in, or press + at its button log"));
  }

  /** Draw over `axis`, by default the next one; a run whose rate rises may be drawn over it. */
  switchAxis(axis) {
    const axes = Object.keys(AXES).slice(0, this.rateRises ? 3 : 2);
    this.axis = axis ?? axes[(axes.indexOf(this.axis) + 1) % axes.length];
    fill(this.axisButton, AXES[this.axis]);
    this.zoom(null);
  }

  /** Take a message of the server: the state, new events, new buckets. */
  apply(message) {
    const evaluatedBefore = this.state?.evaluation?.step, wasOver = this.state?.over;
    this.state = message.state;
    if (message.events_generation !== this.eventsGeneration) { // of another run that has taken the name
      this.eventsGeneration = message.events_generation;
      this.events.clear();
      this.newestEvent = null;
    }
    for (const event of message.events) this.events.set(event.number, event);
    for (const kind of ["step", "evaluation"]) this.curves[kind].apply(message.curves[kind]);
    this.showState();
    this.draw();
    if (wasOver !== this.state.over || this.state.evaluation?.step !== evaluatedBefore) this.readDocuments();
    this.readMachines();
  }

  showState() {
    const state = this.state;
    const stopping = state.stop_reason && !state.over;
    fill(this.status, stopping ? "stopping" : state.status);
    this.status.dataset.status = stopping ? "stopping" : state.status;
    const workers = state.num_workers === 1 ? "1 worker" : `${state.num_workers} workers`;
    const skipped = state.num_skipped ? `${formatNumber(state.num_skipped)} images skipped` : null;
    const retried = state.num_retries ? `${formatNumber(state.num_retries)} requests retried` : null;
    const onCpu = state.num_decoded_on_cpu ? `${formatNumber(state.num_decoded_on_cpu)} images decoded on the CPU` : null;
    const dollars = state.dollars == null ? null : formatDollars(state.dollars);
    const energy = state.gpu_kwh == null ? null : `${state.gpu_kwh.toFixed(2)} kWh`;
    fill(this.facts, [state.num_workers ? workers : null, `${formatDuration(state.elapsed_s)} elapsed`, dollars, energy, skipped, retried, onCpu, state.problem].filter(Boolean).join(" · "));
    this.bar.value = state.status === "finished" ? 1 : state.step / state.num_steps;
    const left = state.time_left_s == null ? "" : ` · ${formatDuration(state.time_left_s)} left`;
    const done = `${Math.floor((100 * state.step) / state.num_steps)} % · epoch ${formatNumber(state.epoch)} of ${formatNumber(state.num_epochs)} · step ${formatNumber(state.step)} of ${formatNumber(state.num_steps)}${left}`;
    const resumes = this.curves.step.step.length > 0; // how far a run is that resumes, its workers say
    fill(this.progress, state.status === "starting" ? ["waiting for the workers …", resumes ? null : done].filter(Boolean).join(" · ") : done);
    this.stopPanel.show(state, [...this.events.values()]);
    this.showBanner();
    this.showTiles();
    fill(this.machines, machineTable(state.over ? [] : state.machines));
    this.showEvents();
  }

  showBanner() {
    const { over, result, status, step } = this.state, { suggestion, resume } = this;
    this.banner.hidden = !over;
    this.banner.dataset.status = status;
    if (!over) return;
    const checkpoint = result?.checkpoint ? el("span", {}, "Checkpoint: ", el("code", {}, result.checkpoint)) : null;
    // The error of a run that can be resumed ends with the command that resumes it, which the last line says with a button.
    const error = resume ? result?.error?.replace(ADVICE, "") : result?.error;
    const reason = error ?? (result?.stop_reason ? `Reason: ${result.stop_reason}.` : null);
    const words = { finished: "Finished", stopped: result?.checkpoint ? "Stopped with a checkpoint" : "Stopped", failed: "Failed", interrupted: "Interrupted" };
    const isFound = suggestion?.rate != null;
    const suggested = isFound ? el("strong", {}, `Suggested learning rate: ${formatRate(suggestion.rate)}. `) : "No learning rate is suggested: ";
    const why = printable(suggestion?.reason ?? "").replace(/^./, (letter) => (isFound ? letter.toUpperCase() : letter));
    const rate = suggestion && el("p", { class: "suggestion" }, suggested, `${why}.`);
    fill(this.banner, el("strong", {}, `${words[status]} after step ${formatNumber(step)}. `), reason ? `${printable(reason)} ` : null, rate, checkpoint, resume ? this.resumeLine(resume) : null);
  }

  /** The command that resumes the run, as the terminal shows it, with a button that copies it. */
  resumeLine({ heading, command }) {
    const copy = el("button", { type: "button", class: "quiet", click: async () => {
      await navigator.clipboard.writeText(command);
      fill(copy, "copied");
    } }, "copy");
    return el("p", { class: "resume" }, `${heading}: `, el("code", {}, command), " ", navigator.clipboard ? copy : null);
  }

  showTiles() {
    const { latest, evaluation, result } = this.state;
    // The checkpoint that `evaluate` and the other commands use is that of the best evaluation by --best, not of the last one.
    const { best_metric: bestName, best_value: bestValue } = result ?? {};
    const hasBetter = bestName === "accuracy" ? bestValue > evaluation?.accuracy : bestValue != null;
    const tiles = [
      ...(result?.test_accuracy == null ? [] : [["Test accuracy", formatPercent(result.test_accuracy)]]),
      ["Validation accuracy", formatPercent(evaluation?.accuracy)],
      ...(hasBetter ? [[`Best validation ${bestName.replaceAll("_", " ")}`, formatMetric(this.metric, bestValue)]] : []),
      ["Validation loss", formatNumber(evaluation?.loss)],
      ["Training loss", formatNumber(latest?.loss)],
      ["Learning rate", formatNumber(latest?.learning_rate)],
      ["Images/s", formatNumber(latest?.images_per_s)],
      ["Waiting for data", formatPercent(latest?.data_wait_fraction)],
    ];
    if (this.rateRises) {
      tiles.splice(0, 2); // nothing is measured
      tiles.unshift(["Suggested rate", this.suggestion ? formatRate(this.suggestion.rate) : "…"]);
    }
    fill(this.tiles, ...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  showEvents() {
    const newest = [...this.events.values()].sort((a, b) => b.number - a.number);
    if (newest[0]?.number === this.newestEvent) return;
    this.newestEvent = newest[0]?.number;
    fill(this.eventList, ...newest.map(({ at_s, text }) => el("li", {}, el("time", {}, formatClock(at_s)), text)));
  }

  draw() {
    const names = new Set([...FIRST, ...Object.keys(KNOWN), ...this.curves.step.metrics.keys(), ...this.curves.evaluation.metrics.keys()]);
    for (const name of names) if (!HIDDEN.has(name)) this.drawChart(name);
  }

  drawChart(name) {
    const series = this.series(name);
    if (this.charts.has(name)) this.charts.get(name).element.hidden = !series.length;
    if (!series.length) return;
    if (!this.charts.has(name)) {
      const { title = name.replaceAll("_", " "), format = formatNumber } = KNOWN[name] ?? {};
      const chart = new Chart({ title, format, sync: `run ${this.name}`, onZoom: (range) => this.zoom(range) });
      this.charts.set(name, chart);
      (FIRST.includes(name) ? this.large : this.small).append(chart.element);
    }
    this.charts.get(name).show(series, { axis: this.axis, range: this.range, whole: this.wholeRange() });
  }

  /** The ends of the x axis of all charts, whose cursors move together: an evaluation comes later than the first steps. */
  wholeRange() {
    const ends = Object.values(this.zoomed ?? this.curves).flatMap((curves) => { const x = curves.x(this.axis).filter((value) => value != null); return x.length ? [x[0], x.at(-1)] : []; });
    return ends.length ? [Math.min(...ends), Math.max(...ends)] : null;
  }

  series(name) {
    const { step, evaluation } = this.zoomed ?? this.curves;
    if (name === "learning_rate" && this.axis === "rate") return []; // over itself
    const series = [], train = step.get(name), validation = evaluation.get(name);
    const smoothed = !name.endsWith("learning_rate");
    if (train?.mean.some((value) => value != null)) {
      const x = step.x(this.axis), averaged = smoothed && this.strength > 0;
      const band = train.low.some((low, i) => low !== train.high[i]) ? { low: train.low, high: train.high } : {};
      series.push({ label: "train", x, y: train.mean, color: COLORS.train, ...band, ...(averaged ? { quiet: true, alpha: 0.3, width: 1 } : {}) });
      if (averaged) series.push({ label: "train", x, y: smooth(step.step, train.mean, this.strength), measured: train.mean, color: COLORS.train });
      series.at(-1).lost = !this.zoomed && isLost(this.state.latest, name);
    }
    if (validation?.mean.some((value) => value != null)) {
      series.push({ label: "validation", x: evaluation.x(this.axis), y: validation.mean, color: COLORS.validation, points: true, lost: !this.zoomed && isLost(this.state.evaluation, name) });
    }
    if (name === "loss" && this.axis === "rate" && this.suggestion?.rate) {
      series.push({ label: `suggested ${formatRate(this.suggestion.rate)}`, x: [this.suggestion.rate], y: [lossAt(step, this.suggestion.rate, this.strength)], color: COLORS.validation, points: true });
    }
    if (!FIRST.includes(name) && !validation) for (const one of series) one.label = "";
    return series;
  }

  /** Show a part of the x axis with finer curves from the server, or everything. */
  async zoom(range) {
    this.range = range;
    this.zoomed = null;
    this.reset.hidden = range === null;
    this.draw();
    if (range === null || !this.api.curves) return;
    const [first, last] = this.axis === "step" ? [Math.floor(range[0]), Math.ceil(range[1])] : this.steps(range);
    const answer = await this.api.curves(this.name, first, last).catch(() => null);
    if (answer === null || this.range !== range) return;
    this.zoomed = Object.fromEntries(Object.entries(answer).map(([kind, change]) => {
      const curves = new Curves();
      curves.apply({ reset: true, ...change });
      return [kind, curves];
    }));
    this.draw();
  }

  /** The steps of a range on another axis. */
  steps([from, until]) {
    const times = this.curves.step.x(this.axis), { step } = this.curves.step;
    const inside = step.filter((_, i) => times[i] >= from && times[i] <= until);
    return inside.length ? [inside[0], inside.at(-1)] : [0, 0];
  }

  async readDocuments() {
    const documents = await this.api.documents?.(this.name).catch(() => null);
    if (!documents) return;
    this.metric = documents.metric;
    this.suggestion = documents.suggestion;
    this.resume = documents.resume;
    fill(this.evaluation, evaluationView(documents.evaluation), suspiciousView(documents.suspicious));
    this.readAgain(documents.suspicious?.step);
    if (documents.config) this.showConfig(documents.config);
    this.showOptions(documents);
    this.showBanner();
    this.showTiles();
    this.draw();
  }

  /** Read the documents once more if the images with suspicious labels, `after` a step, are not those of the last evaluation yet. */
  readAgain(after) {
    const { over, evaluation } = this.state ?? {};
    if (over || after === undefined || after >= evaluation?.step || this.rereads === evaluation?.step) return;
    this.rereads = evaluation?.step;
    setTimeout(() => this.readDocuments(), PICTURES_MS);
  }

  /** Read the use of the machines now and then, while somebody looks, and once more when the run is over. */
  async readMachines() {
    const isDue = performance.now() - this.machinesReadAt > READ_MACHINES_MS && !(this.machinesComplete && this.state?.over);
    if (!this.api.machines || !this.state || this.element.hidden || !isDue) return;
    this.machinesReadAt = performance.now();
    const { over } = this.state;
    const history = await this.api.machines(this.name).catch(() => null);
    if (!history) return;
    this.machinesComplete = over;
    this.machineCurves.show(history);
  }

  /** What tells most runs apart, above everything else; without options that the user's own loop does not use. */
  showOptions({ config, not_compared, made_of, heartbeat_at }) {
    const { tag = [], note } = config ?? {};
    const { model, loop, epochs, batch_size, learning_rate, optimizer, schedule } = Object.fromEntries(Object.entries(config ?? {}).filter(([name]) => !not_compared.includes(name)));
    const rate = typeof learning_rate === "number" && !this.rateRises ? formatRate(learning_rate) : null;
    const options = [["Model", model && formatModel(model)], ["Loop", loop && formatModel(loop)], ["Epochs", this.rateRises ? null : epochs], ["Rate", rate], ["Schedule", schedule], ["Batch", batch_size], ["Optimizer", optimizer], ["Tags", tag.join(" ")], ["Note", note], ["Made of", made_of], ["Last active", formatDate(heartbeat_at)]];
    const known = options.filter(([, value]) => value != null && value !== "");
    this.options.hidden = !config;
    fill(this.options, ...known.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, formatOption(value)))));
  }

  showConfig(config) {
    if (!this.rateRises && config.schedule?.startsWith("rising")) {
      this.rateRises = true;
      this.switchAxis("rate");
    }
    const rows = Object.entries(config).filter(([, value]) => value !== null);
    const table = el("table", {}, ...rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name.replaceAll("_", "-")), el("td", {}, formatOption(value)))));
    fill(this.config, el("h2", {}, "Configuration"), el("div", { class: "scroll" }, table));
  }

  /** Draw everything anew, as after a change of the theme. */
  redraw() {
    for (const chart of this.charts.values()) chart.rebuild();
    this.machineCurves.redraw();
    this.readMachines();
  }
}

/** The loss that the smoothed curve has at the step whose rate comes closest. */
function lossAt(curves, rate, strength) {
  const rates = curves.x("rate"), losses = smooth(curves.step, curves.get("loss").mean, strength);
  const distance = (i) => Math.abs(Math.log(rates[i] / rate));
  return losses[losses.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0)];
}
