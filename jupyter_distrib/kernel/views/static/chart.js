// Charts of reported numbers over steps: one small SVG for each metric, every rank a line, the first one marked.
// `chartOf` is pure; `Chart` draws.

import { drawing, element, fill, set } from "./dom.js";
import { means } from "./mean.js";
import { t, tn } from "./say.js";
import { clock, digits, rankList } from "./words.js";

const SHOWN_CHARTS = 6;
const LEFT = new Set(["done", "failed", "lost"]); // ranks that report nothing more
const MANY = 8; // with more ranks than these, a chart has a mean and a band
const SMOOTH = [0, 0.6, 0.9, 0.97];
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
  return count ? tn("%1 more metric is not drawn", "%1 more metrics are not drawn", count) : "";
}

/** `train/loss`, `val_loss`: the part of the training, and what is measured. */
const PART = /^(?:(train(?:ing)?|val(?:id(?:ation)?)?|eval|test)[/_.-](.+)|(.+)[/_.-](train(?:ing)?|val(?:id(?:ation)?)?|eval|test))$/i;

/** `train` of `train/loss`. */
function partOf(name) {
  const found = PART.exec(name);
  return found ? (found[1] ?? found[4]) : name;
}

/** The charts to draw: a title, and the names that it has a line for. `train/loss` and `val/loss` are one chart. */
export function chartGroups(names) {
  const groups = new Map();
  for (const name of names) {
    const found = PART.exec(name);
    const title = found ? (found[2] ?? found[3]) : name;
    groups.set(title, [...(groups.get(title) ?? []), name]);
  }
  return [...groups].map(([title, of]) => (of.length > 1 ? { title, names: of } : { title: of[0], names: of }));
}

/**
 * What to draw of one metric, or of some that belong together: a path for each rank, of many ranks the mean and a band from
 * the lowest to the highest; and how to get from pixels to numbers. `log`: a logarithmic scale; `smooth`: the weight of what
 * came before, 0 to 1; `time`: over seconds instead of steps; `zoom`: the part of the axis that is shown.
 */
export function chartOf(state, names, { log = false, smooth = 0, time = false, zoom = null } = {}) {
  const inBox = ([x, y]) => (!zoom || (x >= zoom[0] && x <= zoom[1])) && (!log || y > 0);
  const all = [names].flat().map((name) => {
    const lines = state.ranks.map(({ rank, state: at, columns }) => ({ rank, ended: LEFT.has(at), points: pointsOf(columns, name, time) })).filter(({ points }) => points.length);
    const of = (points) => smoothed(points, smooth).filter(inBox);
    if (lines.length <= MANY) return { name, lines: lines.map((line) => ({ ...line, points: of(line.points) })).filter(({ points }) => points.length) };
    const found = means(lines);
    const [mean, low, high] = ["mean", "low", "high"].map((key) => of(found.map((each) => [each.at, each[key], each.step])));
    return { name, lines, mean, low, high };
  });
  const points = all.flatMap(({ lines, mean, low, high }) => (mean ? [...mean, ...low, ...high] : lines.flatMap((line) => line.points)));
  const of = (values) => [Math.min(...values), Math.max(...values)];
  const x = scale(...of(points.map((point) => point[0])), BOX.left, BOX.width - BOX.right);
  const y = scale(...of(points.map((point) => point[1])), BOX.height - BOX.bottom, BOX.top, log);
  const series = all.map(({ name, lines, mean, low, high }) => ({
    name,
    lines: lines.map((line) => ({ ...line, path: mean ? "" : pathOf(line.points, x, y) })),
    points: mean ?? lines[0]?.points ?? [],
    mean: mean ? pathOf(mean, x, y) : null,
    band: mean ? `${pathOf([...low, ...[...high].reverse()], x, y)}Z` : null,
  }));
  const first = series.find(({ lines }) => lines.length) ?? series[0];
  return {
    name: first.name,
    x,
    y,
    series,
    lines: first.lines,
    first: first.lines[0]?.rank ?? null,
    odd: state.ranks.map(({ rank }) => rank).filter((rank) => [names].flat().some((name) => hasOdd(state, rank, name))),
  };
}

/** Points whose values are means of what came before, of which each counts `weight` as much as the next one. */
export function smoothed(points, weight) {
  if (!weight) return points;
  let [sum, total] = [0, 0];
  return points.map(([x, value, step]) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [x, sum / total, step];
  });
}

/** The value of each rank at or before a place on the axis. */
export function valuesAt(chart, place) {
  return chart.lines.map(({ rank, points }) => ({ rank, value: valueAt(points, place) }));
}

function valueAt(points, place) {
  const before = points.filter(([x]) => x <= place);
  return (before[before.length - 1] ?? points[0])[1];
}

function pointsOf(columns, name, time) {
  const values = columns?.[`=${name}`] ?? [];
  const places = (time && columns?.at) || columns?.step;
  return values.map((value, index) => [places[index], value, columns.step[index]]).filter(([, value]) => typeof value === "number");
}

function hasOdd(state, rank, name) {
  const columns = state.ranks.find((each) => each.rank === rank).columns;
  return (columns?.[`=${name}`] ?? []).some((value) => typeof value === "string");
}

function scale(low, high, from, to, log = false) {
  const on = log ? Math.log : (value) => value;
  // Halved first: the range of two large numbers may not be a number.
  const range = on(high) / 2 - on(low) / 2;
  const at = (value) => (range ? from + ((on(value) / 2 - on(low) / 2) / range) * (to - from) : (from + to) / 2);
  return { low, high, at, back: (pixel) => low + ((pixel - from) / (to - from)) * (high - low) };
}

function pathOf(points, x, y) {
  return `M${points.map(([step, value]) => `${x.at(step).toFixed(1)} ${y.at(value).toFixed(1)}`).join("L")}`;
}

/** One chart in the page; `paint` brings it up to date. A range is zoomed into by drawing over it. */
export class Chart {
  constructor({ title, names }, later) {
    this.names = names;
    this.later = later;
    this.layers = new Map();
    this.root = element("figure", "jd-chart");
    const caption = this.root.appendChild(element("figcaption", "jd-chart-head"));
    caption.append((this.label = element("span", "jd-chart-name")), (this.value = element("span", "jd-chart-value")));
    set(this.label, title);
    this.title = title;
    this.back = caption.appendChild(tool(t("zoom out"), () => this.zoomTo(null)));
    this.wider = caption.appendChild(tool("⤢", () => this.widen()));
    this.wider.title = t("Full width");
    this.wider.setAttribute("aria-label", t("%1 over the full width", title));
    this.svg = this.root.appendChild(drawing("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", preserveAspectRatio: "none" }));
    this.cross = this.svg.appendChild(drawing("line", { class: "jd-cross", y1: 0, y2: BOX.height, visibility: "hidden" }));
    this.chosen = this.svg.appendChild(drawing("rect", { class: "jd-chosen", y: 0, height: BOX.height, visibility: "hidden" }));
    const foot = this.root.appendChild(element("div", "jd-chart-foot"));
    foot.append((this.range = element("span")), (this.place = element("span")));
    this.pointed = this.from = this.zoom = null;
    const fraction = (event) => Math.min(1, Math.max(0, event.offsetX / this.svg.clientWidth));
    this.svg.addEventListener("pointermove", (event) => this.point(fraction(event)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("pointerdown", (event) => (this.from = fraction(event)));
    this.svg.addEventListener("pointerup", (event) => this.release(fraction(event)));
    this.svg.addEventListener("dblclick", () => this.zoomTo(null));
  }

  widen() {
    const wide = this.root.classList.toggle("jd-wide");
    this.wider.setAttribute("aria-pressed", String(wide));
  }

  zoomTo(range) {
    this.zoom = range;
    this.seen = null;
    this.later();
  }

  release(to) {
    const [from, { x }] = [this.from, this.chart];
    this.from = null;
    this.point(to);
    if (from === null || Math.abs(to - from) < 0.03) return;
    this.zoomTo([from, to].sort((a, b) => a - b).map((each) => Math.min(x.high, Math.max(x.low, x.back(each * BOX.width)))));
  }

  paint(state, options) {
    this.options = options;
    const chart = (this.chart = chartOf(state, this.names, { ...options, zoom: this.zoom }));
    chart.series.forEach((series, index) => this.layer(series, index));
    const odd = chart.odd.length > 3 ? tn("%1 rank", "%1 ranks", chart.odd.length) : rankList(chart.odd);
    set(this.range, `${t("%1 to %2", digits(chart.y.low, 3), digits(chart.y.high, 3))}${options.log ? ` ${t("log")}` : ""}${chart.odd.length ? ` · ${t("nan or inf on %1", odd)}` : ""}`);
    this.back.hidden = !this.zoom;
    this.write();
  }

  /** Draw one metric: a line for each rank, or the mean of many ranks and a band around it. */
  layer({ lines, mean, band }, index) {
    const drawn = new Map(lines.filter(({ path }) => path).map(({ rank, path }, place) => [`rank ${rank}`, { path, style: place ? "jd-other" : "jd-first" }]));
    if (mean) drawn.set("band", { path: band, style: "jd-band" }).set("mean", { path: mean, style: "jd-first" });
    for (const [key, { path, style }] of drawn) {
      const name = `${index} ${key}`;
      if (!this.layers.has(name)) {
        const node = drawing("path", { class: `${style} jd-series-${index % 3}`, "vector-effect": "non-scaling-stroke" });
        this.layers.set(name, this.svg.insertBefore(node, style === "jd-first" ? this.cross : this.svg.firstChild));
      }
      this.layers.get(name).setAttribute("d", path);
    }
    for (const [name, node] of this.layers) if (name.startsWith(`${index} `) && !drawn.has(name.slice(`${index} `.length))) node.setAttribute("d", "");
  }

  point(fraction) {
    this.pointed = fraction;
    if (this.chart) this.write();
  }

  /** The numbers at the end, or under the pointer. */
  write() {
    const { x, series } = this.chart;
    const place = this.pointed === null ? x.high : x.back(this.pointed * BOX.width);
    const shown = this.options.time ? place : Math.round(place);
    fill(this.value, series, () => element("span"), (node, each) => {
      set(node, each.points.length ? this.told(each, shown) : "");
      node.className = `jd-told jd-told-${series.indexOf(each) % 3}`;
    });
    set(this.place, this.options.time ? clock(shown) : t("step %1", shown));
    this.svg.setAttribute("aria-label", t("%1 over %2: %3 at %4", this.title, this.options.time ? t("time") : t("steps"), [...this.value.children].map((node) => node.textContent).join(", "), this.place.textContent));
    this.cross.setAttribute("visibility", this.pointed === null ? "hidden" : "visible");
    if (this.pointed !== null) for (const key of ["x1", "x2"]) this.cross.setAttribute(key, this.pointed * BOX.width);
    const choosing = this.from !== null && this.pointed !== null;
    this.chosen.setAttribute("visibility", choosing ? "visible" : "hidden");
    if (!choosing) return;
    this.chosen.setAttribute("x", Math.min(this.from, this.pointed) * BOX.width);
    this.chosen.setAttribute("width", Math.abs(this.from - this.pointed) * BOX.width);
  }

  /** `rank 0: 0.41`, `mean: 0.41`; with more than one metric its part, and under the pointer the range over the ranks. */
  told(series, place) {
    const numbers = valuesAt(series, place).map(({ value }) => value);
    const several = this.names.length > 1;
    const who = several ? `${partOf(series.name)} ` : series.mean ? `${t("mean")}: ` : numbers.length > 1 ? `${t("rank %1", series.lines[0].rank)}: ` : "";
    const spread = this.pointed !== null && numbers.length > 1 && !several ? ` (${t("%1 to %2", digits(Math.min(...numbers), 3), digits(Math.max(...numbers), 3))})` : "";
    return `${who}${digits(valueAt(series.points, place))}${spread}`;
  }
}

function tool(text, click) {
  const node = element("button", "jd-tool");
  node.type = "button";
  set(node, text);
  node.addEventListener("click", click);
  return node;
}

/** All charts of a run, and how they are drawn. */
export class Charts {
  constructor(root, later) {
    this.root = root;
    this.later = later;
    this.charts = new Map();
    this.all = false;
    this.options = { log: false, smooth: 0, time: false };
    const tools = root.appendChild(element("div", "jd-chart-tools"));
    tools.setAttribute("role", "toolbar");
    tools.setAttribute("aria-label", t("Charts"));
    tools.append(
      this.option(t("log scale"), "log", [false, true]),
      this.option(t("smooth"), "smooth", SMOOTH),
      this.option(t("over time"), "time", [false, true]),
    );
    this.more = root.appendChild(element("div", "jd-more-charts"));
    this.show = this.more.appendChild(element("button", "jd-show-charts"));
    this.show.type = "button";
    this.show.addEventListener("click", () => ((this.all = !this.all), this.later()));
    this.undrawn = this.more.appendChild(element("span"));
  }

  /** A button that goes through the values of an option. */
  option(text, name, values) {
    const node = tool(text, () => {
      const value = (this.options[name] = values[(values.indexOf(this.options[name]) + 1) % values.length]);
      node.setAttribute("aria-pressed", String(Boolean(value)));
      set(node, value && value !== true ? `${text} ${value}` : text);
      for (const chart of this.charts.values()) [chart.seen, chart.zoom] = [null, name === "time" ? null : chart.zoom];
      this.later();
    });
    node.setAttribute("aria-pressed", "false");
    return node;
  }

  paint(state) {
    const groups = chartGroups(chartNames(state));
    const shown = this.all ? groups : groups.slice(0, SHOWN_CHARTS);
    const keyOf = ({ names }) => names.join("\n");
    const keys = shown.map(keyOf);
    for (const [key, chart] of this.charts) {
      if (keys.includes(key)) continue;
      chart.root.remove();
      this.charts.delete(key);
    }
    const seen = state.ranks.map((rank) => rank.columns);
    shown.forEach((group, index) => {
      if (!this.charts.has(keys[index])) this.charts.set(keys[index], new Chart(group, this.later));
      const chart = this.charts.get(keys[index]);
      if (this.root.children[index + 1] !== chart.root) this.root.insertBefore(chart.root, this.root.children[index + 1]);
      if (!chart.seen || seen.some((columns, place) => columns !== chart.seen[place])) chart.paint(state, this.options);
      chart.seen = seen;
    });
    this.root.hidden = !this.charts.size;
    set(this.show, this.all ? t("Show %1 of %2 charts", SHOWN_CHARTS, groups.length) : tn("Show %1 more", "Show %1 more", groups.length - SHOWN_CHARTS));
    this.show.hidden = groups.length <= SHOWN_CHARTS;
    this.show.setAttribute("aria-expanded", String(this.all));
    set(this.undrawn, undrawn(state));
    this.more.hidden = this.show.hidden && !this.undrawn.textContent;
  }
}
