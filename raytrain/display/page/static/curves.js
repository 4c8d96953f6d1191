// The curves of one run as the server sent them: buckets of steps, with minimum, mean and maximum of each metric.

const METRIC_OF_AXIS = { time: "elapsed_s", rate: "learning_rate" };

export class Curves {
  constructor() {
    this.clear();
  }

  clear() {
    this.width = 1;
    this.step = [];
    this.metrics = new Map(); // name → { mean, low, high }
  }

  /** Take buckets that replace all (`reset`), or those from the first of them on. */
  apply(change) {
    if (change.reset) this.clear();
    if (!change.step.length) return;
    this.width = change.width;
    const first = Math.floor(change.step[0] / change.width);
    let kept = this.step.length;
    while (kept && Math.floor(this.step[kept - 1] / change.width) >= first) kept--;
    this.step.length = kept;
    this.step.push(...change.step);
    for (const name of Object.keys(change.metrics)) if (!this.metrics.has(name)) this.metrics.set(name, { mean: [], low: [], high: [] });
    for (const [name, curve] of this.metrics) extend(curve, kept, change.metrics[name], change.step.length);
  }

  /** The x values: steps, seconds since the start, or learning rates. */
  x(axis) {
    return axis === "step" ? this.step : (this.metrics.get(METRIC_OF_AXIS[axis])?.mean ?? []);
  }

  /** The curve of a metric, or undefined. */
  get(name) {
    return this.metrics.get(name);
  }
}

function extend(curve, kept, added, count) {
  const mean = added?.mean ?? Array(count).fill(null);
  for (const [side, values] of Object.entries({ mean, low: added?.low ?? mean, high: added?.high ?? mean })) {
    while (curve[side].length < kept) curve[side].push(null);
    curve[side].length = kept;
    curve[side].push(...values);
  }
}

/** True if a row has measured a metric, but as no number: its loss has diverged. */
export function isLost(row, name) {
  return row != null && name in row && row[name] == null;
}

/**
 * An exponential moving average over the steps, whatever their distance. `strength` is 0 (none) to 1: the fraction of
 * the visible steps that it averages over, at most a tenth of them.
 */
export function smooth(steps, values, strength) {
  const span = (steps.at(-1) - steps[0]) * 0.1 * strength ** 2;
  if (!(span > 0)) return values;
  let sum = 0, weight = 0, before = steps[0];
  return values.map((value, i) => {
    const keep = Math.exp((before - steps[i]) / span);
    before = steps[i];
    if (value == null) return null;
    sum = sum * keep + value * (1 - keep || 1e-9);
    weight = weight * keep + (1 - keep || 1e-9);
    return sum / weight;
  });
}

/** Columns of several series over the sorted union of their x values; `undefined` where a series has no point. */
export function align(series) {
  const xs = [...new Set(series.flatMap(({ x }) => x.filter((value) => value != null)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const columns = series.map(({ x, y }) => {
    const column = Array(xs.length).fill(undefined);
    x.forEach((value, i) => value != null && (column[place.get(value)] = y[i]));
    return column;
  });
  return [xs, ...columns];
}
