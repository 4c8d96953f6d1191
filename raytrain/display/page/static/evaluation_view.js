// What the last evaluation showed: images as the network sees them, those it gets most wrong, and the confusions.

import { el, formatNumber, formatPercent, nameOf } from "./format.js";

const MAX_TABLE_CLASSES = 24;
const NUM_CONFUSIONS = 8;
const IMAGE = /^data:image\/png;base64,[A-Za-z0-9+/=]+$/;

/** The elements of an `evaluation.json`, null if it holds nothing to show. Anybody may have written it. */
export function evaluationView(document) {
  const classes = Array.isArray(document?.classes) ? document.classes : [];
  const sections = [
    gallery("Most wrong", "The validation images with the largest loss", document?.worst, classes),
    gallery("Last batch", "Training images as the network sees them, and what it says", document?.batch, classes),
    confusions(document?.confusion, classes),
  ].filter(Boolean);
  return sections.length ? el("div", {}, el("h2", {}, `Evaluation after step ${formatNumber(document.step)}`), el("div", { class: "panels" }, ...sections)) : null;
}

/** The elements of a `suspicious-labels.json`, null if it holds nothing to show. Anybody may have written it. */
export function suspiciousView(document) {
  const labels = Array.isArray(document?.labels) ? document.labels : [];
  const figures = labels.filter((one) => IMAGE.test(one?.image)).map(({ key, label, suggested, margin, loss, draws, image }) => {
    const means = `${key}: margin ${formatNumber(margin)}, loss ${formatNumber(loss)}, means of ${formatNumber(draws)} draws`;
    return el(
      "figure",
      { class: margin < 0 ? "wrong" : "right", title: means },
      el("img", { src: image, alt: `${label}, or ${suggested}?` }),
      el("figcaption", {}, el("b", {}, nameOf(label)), el("div", { class: "said" }, "or ", nameOf(`${suggested}?`))),
    );
  });
  const about = el("p", { class: "about" }, "The training images with the lowest margin of their label over all epochs; ", el("code", {}, "raytrain look"), " lists more, and writes a label file to correct");
  return figures.length ? el("div", {}, el("h2", {}, "Labels that may be wrong"), el("div", { class: "panels" }, el("section", {}, about, el("div", { class: "gallery" }, ...figures)))) : null;
}

function gallery(title, about, examples, classes) {
  if (!Array.isArray(examples) || !examples.length) return null;
  const figures = examples.filter((example) => IMAGE.test(example?.image)).map((example) => {
    const { image, label, prediction, probability, key } = example;
    const right = label === prediction;
    const said = classes[prediction] ?? prediction, sure = probability == null ? "" : `${(100 * probability).toFixed(0)} %`;
    return el(
      "figure",
      { class: right ? "right" : "wrong", title: [`${classes[label] ?? label}, predicted ${said}`, key].filter(Boolean).join("\n") },
      el("img", { src: image, alt: `${classes[label] ?? label}, predicted ${said} ${sure}` }),
      el("figcaption", {}, el("b", {}, nameOf(classes[label] ?? label)), el("div", { class: "said" }, nameOf(said), el("i", {}, sure && `(${sure})`))),
    );
  });
  return el("section", {}, el("h3", {}, title), el("p", { class: "about" }, about), el("div", { class: "gallery" }, ...figures));
}

function confusions(given, classes) {
  const cells = Array.isArray(given) ? given.filter((cell) => isCell(cell, classes.length)) : [];
  if (!cells.length) return null;
  const totals = classes.map(() => 0);
  for (const [label, , count] of cells) totals[label] += count;
  const wrong = cells.filter(([label, prediction]) => label !== prediction).slice(0, NUM_CONFUSIONS);
  const list = el("ol", { class: "confusions" }, ...wrong.map(([label, prediction, count]) =>
    el("li", {}, el("b", {}, classes[label]), " taken for ", el("b", {}, classes[prediction]), `: ${formatNumber(count)} × (${formatPercent(count / totals[label])})`)));
  const matrix = classes.length <= MAX_TABLE_CLASSES ? table(cells, classes, totals) : picture(cells, classes, totals);
  return el("section", { class: "confusion" }, el("h3", {}, "Confusion matrix"), el("p", { class: "about" }, "Rows are the labels, columns the predictions"), matrix, wrong.length ? list : null);
}

/** True if a cell is three numbers: of a label, of a prediction, and how many images have both. */
function isCell(cell, count) {
  return Array.isArray(cell) && cell.length === 3 && cell.every((part) => Number.isInteger(part) && part >= 0) && cell[0] < count && cell[1] < count;
}

/** The counts by "label prediction". */
function countsOf(cells) {
  return new Map(cells.map(([label, prediction, count]) => [`${label} ${prediction}`, count]));
}

/** What a cell says: the class, what it was taken for, and how many times. */
function about(label, prediction, count, classes) {
  return `${classes[label]} taken for ${classes[prediction]}: ${formatNumber(count)}`;
}

function table(cells, classes, totals) {
  const counts = countsOf(cells);
  const head = el("tr", {}, el("td"), ...classes.map((name) => el("th", { scope: "col", title: name }, nameOf(name))));
  const rows = classes.map((name, label) => el("tr", {}, el("th", { scope: "row", title: name }, nameOf(name)), ...classes.map((_, prediction) => cell(counts.get(`${label} ${prediction}`) ?? 0, label, prediction, totals, classes))));
  return el("div", { class: "scroll" }, el("table", { class: "matrix" }, head, ...rows));
}

function cell(count, label, prediction, totals, classes) {
  const fraction = totals[label] ? count / totals[label] : 0;
  const element = el("td", { title: about(label, prediction, count, classes), "data-right": label === prediction }, count ? formatNumber(count) : "");
  element.style.setProperty("--share", `${(100 * Math.sqrt(fraction)).toFixed(0)}%`);
  return element;
}

/** A matrix of too many classes for a table, a pixel for each cell; the cell under the cursor says what it is. */
function picture(cells, classes, totals) {
  const counts = countsOf(cells);
  const point = ({ offsetX, offsetY }) => {
    const [prediction, label] = [offsetX, offsetY].map((place) => Math.min(classes.length - 1, Math.floor((classes.length * place) / canvas.clientWidth)));
    canvas.title = about(label, prediction, counts.get(`${label} ${prediction}`) ?? 0, classes);
  };
  const canvas = el("canvas", { class: "matrix", width: classes.length, height: classes.length, role: "img", "aria-label": `confusion matrix of ${classes.length} classes`, mousemove: point });
  const context = canvas.getContext("2d");
  for (const [label, prediction, count] of cells) {
    context.fillStyle = `rgba(${label === prediction ? "14, 138, 138" : "200, 80, 20"}, ${Math.sqrt(count / totals[label])})`;
    context.fillRect(prediction, label, 1, 1);
  }
  return canvas;
}
