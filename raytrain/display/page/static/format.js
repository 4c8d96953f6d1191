// Numbers, times and elements. Text from outside, such as a class name, only ever becomes the text of an element.

export const UNKNOWN = "–";

// Control characters, marks that reverse the direction of text, and halves of characters.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]|\p{Surrogate}/gu;

/** A text from outside as it may be shown. */
export function printable(text) {
  return String(text).replace(CONTROLS, "\ufffd");
}

/** An element with attributes (functions are listeners) and children (text or elements; null is left out). */
export function el(tag, attributes = {}, ...children) {
  return made(document.createElement(tag), attributes, children);
}

/** The same, a part of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  fill(element, ...children);
  return element;
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child != null).map((child) => (child instanceof Node ? child : printable(child))));
}

/** The same for a list that is made anew while somebody may be in it with the keyboard, who stays at the same place. */
export function refill(element, ...children) {
  const named = ({ tagName, ariaLabel, textContent }) => `${tagName} ${ariaLabel ?? textContent}`;
  const focused = element.contains(document.activeElement) ? named(document.activeElement) : null;
  fill(element, ...children);
  [...element.querySelectorAll("a, button, input")].find((one) => named(one) === focused)?.focus({ preventScroll: true });
}

/** A name as an element that is cut before its last four letters where it has no room: names often differ in their ends alone. */
export function nameOf(name) {
  const letters = [...printable(name)], end = letters.length > 12 ? letters.length - 4 : letters.length;
  return el("span", { class: "cut", dir: "auto" }, el("span", {}, letters.slice(0, end).join("")), el("span", {}, letters.slice(end).join("")));
}

/** The digits after the point that tell multiples of `interval` apart: 3 for 0.025. */
function digitsOf(interval) {
  let digits = 0;
  while (digits < 9 && Math.abs(interval * 10 ** digits - Math.round(interval * 10 ** digits)) > 1e-6) digits++;
  return digits;
}

/** A number with as many digits as are worth reading, more for the ticks of an axis that are `interval` apart. */
export function formatNumber(value, interval = 1) {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 4 : 3 - Math.floor(Math.log10(size)); // 0.03295, as in the terminal
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(digits, digitsOf(interval)) });
}

/** A fraction in percent; for the ticks of an axis with the digits that tell fractions apart that differ by `interval`. */
export function formatPercent(value, interval = 1) {
  const digits = Math.max(Math.abs(value) < 0.1 ? 2 : 1, digitsOf(100 * interval));
  return value == null ? UNKNOWN : `${(100 * value).toFixed(digits)} %`;
}

/** The best of the known values of a metric, which has a `name` and says whether it `is_lower_better`; null if none is known. */
export function bestOf({ is_lower_better }, values) {
  const known = values.filter((value) => value != null);
  if (!known.length) return null;
  return is_lower_better ? Math.min(...known) : Math.max(...known);
}

/** A value of a metric: a fraction in percent, another one as a number. */
export function formatMetric({ is_fraction }, value, interval) {
  return is_fraction ? formatPercent(value, interval) : formatNumber(value, interval);
}

/** Dollars with cents, and with more digits below a dollar. */
export function formatDollars(dollars) {
  if (dollars == null) return UNKNOWN;
  const digits = dollars < 1 ? 4 : 2;
  return `$${dollars.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
}

/** As in 4 s, 12 min 5 s, 3 h 20 min. */
export function formatDuration(seconds) {
  if (seconds == null) return UNKNOWN;
  const s = Math.floor(seconds + 1e-6); // as a clock shows it, and the terminal; a tick of an axis may be 59.9999999
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** As in 00:12:34, for lines that stand below each other. */
export function formatClock(seconds) {
  const s = Math.floor(seconds);
  return [s / 3600, (s / 60) % 60, s % 60].map((part) => String(Math.floor(part)).padStart(2, "0")).join(":");
}

/** A moment as an engineer says it: 14:05 today, 3 Nov 14:05 in this year, otherwise 3 Nov 2025. */
export function formatDate(text) {
  const date = new Date(text), now = new Date();
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  const time = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" }, day = { day: "numeric", month: "short" };
  if (date.toDateString() === now.toDateString()) return `today ${date.toLocaleTimeString("en-GB", time)}`;
  if (date.getFullYear() === now.getFullYear()) return `${date.toLocaleDateString("en-GB", day)} ${date.toLocaleTimeString("en-GB", time)}`;
  return date.toLocaleDateString("en-GB", { ...day, year: "numeric" });
}

/** A learning rate as a user types it: 0.0004, 1e-7, 0.1/worker. */
export function formatRate(rate) {
  return typeof rate === "number" ? String(Number(rate.toPrecision(4))) : (rate ?? UNKNOWN);
}

/** A network without where its code is: mobilenet_v3_small, digits for raytrain.models:digits, net.py:Net. */
export function formatModel(model) {
  if (!model) return UNKNOWN;
  const [place, name] = [model.slice(0, model.lastIndexOf(":")), model.slice(model.lastIndexOf(":") + 1)];
  return place.endsWith(".py") ? `${place.slice(place.lastIndexOf("/") + 1)}:${name}` : name;
}

/** The value of an option, as a user types it. */
export function formatOption(value) {
  if (value == null) return UNKNOWN;
  return Array.isArray(value) ? value.map(formatOption).join(" ") || UNKNOWN : String(value);
}
