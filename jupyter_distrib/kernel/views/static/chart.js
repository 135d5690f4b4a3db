// Charts of reported numbers over steps: one small SVG for each metric, every rank a line, the first one marked.
// `chartOf` is pure; `Chart` draws.

import { drawing, element, set } from "./dom.js";
import { digits } from "./words.js";

export const BOX = { width: 300, height: 96, top: 6, bottom: 6, left: 4, right: 4 };

/** The names of numbers that change, in the order in which they were first reported. */
export function chartNames(state) {
  const changing = new Map();
  for (const { columns } of state.ranks) {
    for (const key of Object.keys(columns ?? {})) {
      if (!key.startsWith("=")) continue;
      const numbers = columns[key].filter((value) => typeof value === "number");
      changing.set(key.slice(1), changing.get(key.slice(1)) || numbers.some((value) => value !== numbers[0]));
    }
  }
  return [...changing].filter(([, changes]) => changes).map(([name]) => name);
}

/** How many numbers the kernel has not sent, in words. */
export function undrawn(state) {
  const count = Math.max(0, ...state.ranks.map(({ columns }) => columns?.left ?? 0));
  return count ? `${count} more metric${count === 1 ? " is" : "s are"} not drawn` : "";
}

/** What to draw of one metric: a path for each rank, and how to get from pixels to numbers. */
export function chartOf(state, name) {
  const lines = state.ranks.map(({ rank, columns }) => ({ rank, points: pointsOf(columns, name) }));
  const drawn = lines.filter(({ points }) => points.length);
  const xs = drawn.flatMap(({ points }) => points.map(([x]) => x));
  const ys = drawn.flatMap(({ points }) => points.map(([, y]) => y));
  const x = scale(Math.min(...xs), Math.max(...xs), BOX.left, BOX.width - BOX.right);
  const y = scale(Math.min(...ys), Math.max(...ys), BOX.height - BOX.bottom, BOX.top);
  return {
    name,
    x,
    y,
    lines: drawn.map(({ rank, points }) => ({ rank, points, path: pathOf(points, x, y) })),
    first: drawn[0]?.rank ?? null,
    odd: lines.filter(({ rank }) => hasOdd(state, rank, name)).map(({ rank }) => rank),
  };
}

/** The value of each rank at or before a step. */
export function valuesAt(chart, step) {
  return chart.lines.map(({ rank, points }) => {
    const before = points.filter(([x]) => x <= step);
    return { rank, value: (before[before.length - 1] ?? points[0])[1] };
  });
}

function pointsOf(columns, name) {
  const values = columns?.[`=${name}`] ?? [];
  return values.map((value, index) => [columns.step[index], value]).filter(([, value]) => typeof value === "number");
}

function hasOdd(state, rank, name) {
  const columns = state.ranks.find((each) => each.rank === rank).columns;
  return (columns?.[`=${name}`] ?? []).some((value) => typeof value === "string");
}

function scale(low, high, from, to) {
  // Halved first: the range of two large numbers may not be a number.
  const range = high / 2 - low / 2;
  const at = (value) => (range ? from + ((value / 2 - low / 2) / range) * (to - from) : (from + to) / 2);
  return { low, high, at, back: (pixel) => low + ((pixel - from) / (to - from)) * (high - low) };
}

function pathOf(points, x, y) {
  return `M${points.map(([step, value]) => `${x.at(step).toFixed(1)} ${y.at(value).toFixed(1)}`).join("L")}`;
}

/** One chart in the page; `paint` brings it up to date. */
export class Chart {
  constructor(name) {
    this.name = name;
    this.paths = new Map();
    this.root = element("figure", "jd-chart");
    const caption = this.root.appendChild(element("figcaption", "jd-chart-head"));
    caption.append((this.label = element("span", "jd-chart-name")), (this.value = element("span", "jd-chart-value")));
    this.svg = this.root.appendChild(drawing("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", preserveAspectRatio: "none" }));
    this.others = this.svg.appendChild(drawing("g", { class: "jd-others" }));
    this.cross = this.svg.appendChild(drawing("line", { class: "jd-cross", y1: 0, y2: BOX.height, visibility: "hidden" }));
    const foot = this.root.appendChild(element("div", "jd-chart-foot"));
    foot.append((this.range = element("span")), (this.steps = element("span")));
    this.pointed = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX / this.svg.clientWidth));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  paint(state) {
    const chart = (this.chart = chartOf(state, this.name));
    for (const { rank, path } of chart.lines) this.path(rank, rank === chart.first).setAttribute("d", path);
    set(this.label, this.name);
    set(this.range, `${digits(chart.y.low, 3)} to ${digits(chart.y.high, 3)}${chart.odd.length ? ` · nan or inf on ${chart.odd.length > 3 ? `${chart.odd.length} ranks` : chart.odd.map((rank) => `rank ${rank}`).join(", ")}` : ""}`);
    this.write();
  }

  path(rank, marked) {
    if (!this.paths.has(rank)) {
      const path = drawing("path", { class: marked ? "jd-first" : "jd-other", "vector-effect": "non-scaling-stroke" });
      this.paths.set(rank, marked ? this.svg.insertBefore(path, this.cross) : this.others.appendChild(path));
    }
    return this.paths.get(rank);
  }

  point(fraction) {
    this.pointed = fraction;
    if (this.chart) this.write();
  }

  /** The numbers at the end, or under the pointer. */
  write() {
    const { x, first, lines } = this.chart;
    const step = this.pointed === null ? x.high : Math.round(x.back(this.pointed * BOX.width));
    const values = valuesAt(this.chart, step);
    const own = values.find(({ rank }) => rank === first);
    const numbers = values.map(({ value }) => value);
    const spread = lines.length > 1 ? ` (${digits(Math.min(...numbers), 3)} to ${digits(Math.max(...numbers), 3)})` : "";
    set(this.value, own ? `${lines.length > 1 ? `rank ${first}: ` : ""}${digits(own.value)}${this.pointed === null ? "" : spread}` : "");
    set(this.steps, `step ${step}`);
    this.svg.setAttribute("aria-label", `${this.name} over steps: ${this.value.textContent} at step ${step}`);
    this.cross.setAttribute("visibility", this.pointed === null ? "hidden" : "visible");
    if (this.pointed !== null) for (const key of ["x1", "x2"]) this.cross.setAttribute(key, this.pointed * BOX.width);
  }
}
