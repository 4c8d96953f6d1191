// Parallel coordinates: one vertical axis for each option that differs, and one for the metric; a line for each run.

import { el, fill, formatMetric, formatNumber, formatOption, svg } from "./format.js";

const HEIGHT = 260, TOP = 34, BOTTOM = 26, SIDE = 56;
const MIN_DISTANCE = 110; // of two axes: their titles have room
const LETTER = 7; // pixels that one of a word takes

export class ParallelCoordinates {
  /** `choose(name)` is called with the run whose line is clicked. */
  constructor(choose) {
    this.choose = choose;
    this.picture = svg("svg", { height: HEIGHT, role: "img", "aria-label": "parallel coordinates" });
    this.frame = el("div", { class: "scroll" }, this.picture);
    new ResizeObserver(() => this.draw()).observe(this.frame);
    this.element = el("figure", { class: "chart coordinates", hidden: true }, el("figcaption", {}, el("h3", {}, "What makes the difference"), el("div", { class: "values" }, "a line is a run, the better the stronger")), this.frame);
  }

  /** Show `runs`, each with `name`, `values` by option and `score`, the best value of the `metric` or null. */
  show(runs, options, metric) {
    this.metric = metric;
    this.element.hidden = runs.length < 2 || !options.length;
    this.runs = runs;
    this.options = options;
    this.draw();
  }

  draw() {
    if (this.element.hidden) return;
    const { runs, options } = this, width = Math.max(this.frame.clientWidth, 2 * SIDE + MIN_DISTANCE * options.length);
    this.picture.setAttribute("width", width);
    const axes = [...options.map((option) => axis(option.replaceAll("_", "-"), runs.map(({ values }) => values[option]), formatNumber)), axis(`best ${this.metric.name.replaceAll("_", " ")}`, runs.map(({ score }) => score), (value) => formatMetric(this.metric, value))];
    axes.forEach((one, i) => { one.x = SIDE + ((width - 2 * SIDE) * i) / (axes.length - 1); });
    const scores = axes.at(-1);
    const lines = runs.map(({ name, values, score }) => ({ name, rank: score == null ? 0 : this.metric.is_lower_better ? scores.place(score) : 1 - scores.place(score), points: axes.map((one, i) => [one.x, one.place(i < options.length ? values[options[i]] : score)]) }));
    fill(this.picture, ...lines.sort((a, b) => a.rank - b.rank).map((line) => this.line(line)), ...axes.flatMap((one) => drawAxis(one, (axes[1].x - axes[0].x) / LETTER)));
  }

  line({ name, rank, points }) {
    const known = points.filter(([, y]) => y !== null);
    const d = known.map(([x, y], i) => `${i ? "L" : "M"}${x} ${vertical(y)}`).join("");
    return svg("path", { d, class: "line", "stroke-opacity": 0.2 + 0.8 * rank, click: () => this.choose(name) }, svg("title", {}, name));
  }
}

/**
 * An axis: `place(value)` is 0 at the top to 1. Numbers over two decades are on a logarithmic scale; one that is not known has no place,
 * null, whereas no word is a word, too.
 */
function axis(title, values, format) {
  const known = values.filter((value) => value != null);
  if (!known.every((value) => typeof value === "number")) {
    const words = [...new Set(values.map(formatOption))].sort();
    return { title, ticks: words.map((word, i) => [share(i, words.length), word]), place: (value) => share(words.indexOf(formatOption(value)), words.length) };
  }
  const low = Math.min(...known), high = Math.max(...known);
  const scale = low > 0 && high / low > 50 ? Math.log : (value) => value;
  const place = (value) => (value == null ? null : high === low ? 0.5 : 1 - (scale(value) - scale(low)) / (scale(high) - scale(low)));
  return { title, place, ticks: known.length ? [...new Set([low, high])].map((value) => [place(value), format(value)]) : [] };
}

function share(i, count) {
  return count < 2 ? 0.5 : i / (count - 1);
}

/** The elements of an axis; words of more than `room` letters, which would reach the next one, keep their ends alone. */
function drawAxis({ x, title, ticks }, room) {
  const cut = (text) => (text.length > room ? `…${text.slice(1 - room)}` : text);
  return [
    svg("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, class: "axis" }),
    svg("text", { x, y: 16, class: "title" }, title),
    ...ticks.map(([y, text]) => svg("text", { x: x + 6, y: vertical(y) + 4, class: "tick" }, cut(text))),
  ];
}

function vertical(y) {
  return TOP + y * (HEIGHT - TOP - BOTTOM);
}
