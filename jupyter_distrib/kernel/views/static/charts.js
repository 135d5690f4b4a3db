// Charts of reported numbers in the page: one for each metric, with a cursor that all of them share. A line is that of a
// rank, or with `runs` that of a whole run: `name` gives what it is called.

import { BOX, chartGroups, chartNames, chartOf, chartText, crossOf, isNoisy, oddsOfEach, partOf, ticks, undrawn, valueAt, valuesAt } from "./chart.js";
import { drawing, element, fill, set } from "./dom.js";
import { t, tn } from "./say.js";
import { clock, digits } from "./words.js";

const SHOWN_CHARTS = 6;
const SHOWN_VALUES = 8; // of ranks under the cursor
const SMOOTH = [0, 0.6, 0.9, 0.97];

/** One chart in the page; `paint` brings it up to date. A range is zoomed into by drawing over it. */
export class Chart {
  constructor({ title, names }, later, point, runs = null) {
    this.names = names;
    this.runs = runs;
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
    this.ups = this.root.appendChild(element("div", "jd-ticks jd-ups"));
    this.ups.setAttribute("aria-hidden", "true");
    const plot = this.root.appendChild(element("div", "jd-plot"));
    this.svg = plot.appendChild(drawing("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", preserveAspectRatio: "none" }));
    for (const y of [BOX.top, BOX.height / 2, BOX.height - BOX.bottom]) this.svg.appendChild(drawing("line", { class: "jd-grid", x1: 0, x2: BOX.width, y1: y, y2: y }));
    this.cross = this.svg.appendChild(drawing("line", { class: "jd-cross", y1: 0, y2: BOX.height, visibility: "hidden" }));
    this.chosen = this.svg.appendChild(drawing("rect", { class: "jd-chosen", y: 0, height: BOX.height, visibility: "hidden" }));
    this.marks = plot.appendChild(element("div", "jd-marks"));
    this.marks.setAttribute("aria-hidden", "true");
    this.acrosses = this.root.appendChild(element("div", "jd-ticks jd-acrosses"));
    this.acrosses.setAttribute("aria-hidden", "true");
    this.foot = this.root.appendChild(element("div", "jd-chart-foot"));
    if (runs) this.keys = this.root.appendChild(element("ul", "jd-runs"));
    this.pointed = this.from = this.zoom = null;
    const fraction = (event) => Math.min(1, Math.max(0, event.offsetX / this.svg.clientWidth));
    const place = (event) => this.chart.x.back(fraction(event) * BOX.width);
    this.svg.addEventListener("pointermove", (event) => point(place(event), this));
    this.svg.addEventListener("pointerleave", () => point(null, this));
    this.svg.addEventListener("pointerdown", (event) => (this.from = place(event)));
    this.svg.addEventListener("pointerup", (event) => this.release(place(event)));
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
    if (from === null || Math.abs(to - from) < 0.03 * (x.high - x.low)) return;
    this.zoomTo([from, to].sort((a, b) => a - b).map((each) => Math.min(x.high, Math.max(x.low, each))));
  }

  paint(state, options) {
    this.options = options;
    const chart = (this.chart = chartOf(state, this.names, { ...options, zoom: this.zoom, each: this.runs !== null }));
    this.odds = this.runs ? oddsOfEach(state, this.names[0], options.time) : [];
    this.all = state.ranks.map(({ rank }) => rank);
    this.reporting = this.runs ? state.ranks.filter(({ columns }) => columns?.[`=${this.names[0]}`]).map(({ rank }) => rank) : [];
    chart.series.forEach((series, index) => this.layer(series, index));
    const write = (node, value) => set(node, digits(value, 3));
    fill(this.ups, ticks(chart.y, BOX.height - BOX.bottom, BOX.top).reverse(), () => element("span"), write);
    const across = ticks(chart.x, BOX.left, BOX.width - BOX.right);
    fill(this.acrosses, across, () => element("span"), (node, value) => set(node, options.time ? clock(value) : value === across[0] ? t("step %1", Math.round(value)) : String(Math.round(value))));
    this.paintMarks(chart);
    this.back.hidden = !this.zoom;
    this.write();
  }

  /** A dot at the best value, and a cross where a line became nan. */
  paintMarks(chart) {
    const best = this.runs ? [] : chart.series.map(({ best }, index) => best && { sign: "●", place: [chart.x.at(best[0]) / BOX.width, chart.y.at(best[1]) / BOX.height], style: `jd-best jd-told-${index % 3}`, text: t("best %1 at step %2", digits(best[1]), best[2]) });
    const series = chart.series[0];
    const odds = this.runs ? this.odds.map((odd) => ({ ...series, odd })) : chart.series;
    const odd = odds.map((series) => series.odd && { sign: "×", place: crossOf(chart, series), style: "jd-turned", text: series.odd.text });
    fill(this.marks, [...best, ...odd].filter(Boolean), () => element("span"), (node, { sign, place: [left, top], style, text }) => {
      set(node, sign);
      [node.className, node.title] = [style, text];
      [node.style.left, node.style.top] = [`${100 * left}%`, `${100 * top}%`];
    });
  }

  /** Draw one metric: a line for each rank, or the mean of many ranks and a band around it. */
  layer({ lines, mean, band }, index) {
    const drawn = new Map(lines.filter(({ path }) => path).map(({ rank, path }, place) => [`rank ${rank}`, { path, style: this.runs ? "jd-each" : place ? "jd-other" : "jd-first", css: this.runs ? lineStyle(this.placeOf(rank)) : "" }]));
    if (mean) drawn.set("band", { path: band, style: "jd-band" }).set("mean", { path: mean, style: "jd-first" });
    for (const [key, { path, style, css }] of drawn) {
      const name = `${index} ${key}`;
      if (!this.layers.has(name)) {
        const node = drawing("path", { class: `${style} jd-series-${index % 3}`, "vector-effect": "non-scaling-stroke" });
        node.style.cssText = css ?? "";
        node.dataset.line = key;
        this.layers.set(name, this.svg.insertBefore(node, style === "jd-first" || style === "jd-each" ? this.cross : this.svg.firstChild));
      }
      this.layers.get(name).setAttribute("d", path);
    }
    for (const [name, node] of this.layers) if (name.startsWith(`${index} `) && !drawn.has(name.slice(`${index} `.length))) node.setAttribute("d", "");
  }

  /** The cursor is at a place on the axis, of this chart or of another; null: nowhere. */
  point(place) {
    this.pointed = place;
    if (this.chart) this.write();
  }

  /** The numbers at the end, or under the cursor. */
  write() {
    const { x, series } = this.chart;
    const inside = this.pointed !== null && this.pointed >= x.low && this.pointed <= x.high;
    const place = inside ? this.pointed : x.high;
    const shown = this.options.time ? place : Math.round(place);
    fill(this.value, series, () => element("span"), (node, each) => {
      set(node, this.told(each, shown, inside));
      node.className = `jd-told jd-told-${series.indexOf(each) % 3}`;
    });
    set(this.foot, this.remarks(shown, inside));
    this.foot.classList.toggle("jd-turned", !inside && !this.runs && series.some(({ odd }) => odd));
    if (this.runs) this.writeRuns(series[0], place, inside);
    else this.svg.setAttribute("aria-label", `${chartText(this.title, this.chart)}; ${this.options.time ? clock(shown) : t("step %1", shown)}`);
    this.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    const at = inside ? x.at(this.pointed) : 0;
    for (const key of ["x1", "x2"]) this.cross.setAttribute(key, at);
    const choosing = this.from !== null && inside;
    this.chosen.setAttribute("visibility", choosing ? "visible" : "hidden");
    if (!choosing) return;
    this.chosen.setAttribute("x", Math.min(x.at(this.from), at));
    this.chosen.setAttribute("width", Math.abs(x.at(this.from) - at));
  }

  placeOf(rank) {
    return this.all.indexOf(rank);
  }

  /** The name of each run with its value at the end, or under the cursor; of one that is nan, since when. */
  writeRuns(series, place, inside) {
    const told = this.reporting.map((rank) => {
      const points = series.lines.find((line) => line.rank === rank)?.points ?? [];
      const odd = this.odds.find(({ line }) => line === rank);
      const value = points.length ? digits(valueAt(points, place)) : "";
      const whole = !inside && odd ? (odd.word || !value ? odd.text : `${value} (${odd.text})`) : value;
      return { rank, odd, text: whole };
    });
    fill(this.keys, told, newRun, (node, { rank, odd, text }) => {
      node.children[0].firstChild.style.cssText = lineStyle(this.placeOf(rank));
      set(node.children[1], this.runs.name(rank));
      set(node.children[2], text);
      node.children[2].classList.toggle("jd-turned", !inside && Boolean(odd));
    });
    const words = told.map(({ rank, text }) => `${this.runs.name(rank)} ${text}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.options.time ? t("%1 over time", this.title) : t("%1 over steps", this.title)}: ${words}`);
  }

  /** `rank 0: 0.41`, `mean: 0.41`; with more than one metric its part; at the end `nan` of a line that is. */
  told(series, place, inside) {
    if (this.runs) return "";
    if (!inside && series.odd?.word) return `${this.names.length > 1 ? `${partOf(series.name)} ` : ""}${series.odd.word}`;
    if (!series.points.length) return "";
    const who = this.names.length > 1 ? `${partOf(series.name)} ` : series.mean ? `${t("mean")}: ` : series.lines.length > 1 ? `${t("rank %1", series.lines[0].rank)}: ` : "";
    return `${who}${digits(valueAt(series.points, place))}`;
  }

  /** Under the cursor the step and the values of all ranks; else what is nan, the best value, and the kind of scale. */
  remarks(place, inside) {
    const { series } = this.chart;
    if (this.runs) return [this.options.log ? t("log scale") : "", inside ? (this.options.time ? clock(place) : t("step %1", place)) : ""].filter(Boolean).join(" · ");
    if (!inside) {
      const odd = series.map(({ odd, name }) => odd && (series.length > 1 ? `${partOf(name)} ${odd.text}` : odd.text));
      const best = series.length === 1 && series[0].best ? t("best %1 at step %2", digits(series[0].best[1]), series[0].best[2]) : "";
      return [this.options.log ? t("log scale") : "", ...odd, best].filter(Boolean).join(" · ");
    }
    const where = this.options.time ? clock(place) : t("step %1", place);
    const values = series.length === 1 ? valuesAt(series[0], place) : [];
    if (values.length < 2) return where;
    const numbers = values.map(({ value }) => value);
    const range = t("%1 to %2", digits(Math.min(...numbers), 3), digits(Math.max(...numbers), 3));
    const each = values.length > SHOWN_VALUES ? range : values.map(({ rank, value }) => `${rank}: ${digits(value, 3)}`).join("  ");
    return `${where} · ${tn("rank", "ranks", values.length)} ${each}`;
  }
}

function newRun() {
  const node = element("li");
  const line = node.appendChild(drawing("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }));
  line.appendChild(drawing("path", { d: "M0 4H22", class: "jd-each" }));
  node.append(element("span"), element("span", "jd-value"));
  return node;
}

const DASHES = ["", "6 3", "2 2", "9 3 2 3"];

/** How the line of the run at this place is drawn: up to 20 differ by colour, and those beside one another by dashes. */
export function lineStyle(place) {
  return `fill: none; stroke: oklch(0.62 0.16 ${Math.round(40 + place * 137.5) % 360}); stroke-dasharray: ${DASHES[place % DASHES.length] || "none"}`;
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
  constructor(root, later, runs = null) {
    this.root = root;
    this.later = later;
    this.runs = runs;
    this.charts = new Map();
    this.all = false;
    this.options = { log: false, smooth: 0, time: false };
    const tools = (this.tools = root.appendChild(element("div", "jd-chart-tools")));
    tools.setAttribute("role", "toolbar");
    tools.setAttribute("aria-label", t("Charts"));
    tools.append(
      this.option(t("log scale"), "log", [false, true]),
      (this.smooth = this.option(t("smooth"), "smooth", SMOOTH)),
      this.option(t("over time"), "time", [false, true]),
    );
    this.grid = root.appendChild(element("div", "jd-chart-grid"));
    this.more = root.appendChild(element("div", "jd-more-charts"));
    this.show = this.more.appendChild(element("button", "jd-show-charts"));
    this.show.type = "button";
    this.show.addEventListener("click", () => ((this.all = !this.all), this.later()));
    this.undrawn = this.more.appendChild(element("span"));
  }

  /** One cursor for all charts: `place` on the axis, or null. */
  point = (place) => {
    for (const chart of this.charts.values()) chart.point(place);
  };

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
    const names = chartNames(state);
    const groups = this.runs ? names.map((name) => ({ title: name, names: [name] })) : chartGroups(names);
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
      if (!this.charts.has(keys[index])) this.charts.set(keys[index], new Chart(group, this.later, this.point, this.runs));
      const chart = this.charts.get(keys[index]);
      if (this.grid.children[index] !== chart.root) this.grid.insertBefore(chart.root, this.grid.children[index] ?? null);
      if (!chart.seen || seen.some((columns, place) => columns !== chart.seen[place])) chart.paint(state, this.options);
      chart.seen = seen;
    });
    this.root.hidden = !this.charts.size;
    const noisy = [...this.charts.values()].some(({ chart }) => chart.series.some(({ points }) => isNoisy(points)));
    this.smooth.toggleAttribute("data-offered", noisy && !this.options.smooth);
    this.smooth.title = noisy ? t("These numbers go up and down: smooth lines show where they go") : "";
    set(this.show, this.all ? t("Show %1 of %2 charts", SHOWN_CHARTS, groups.length) : tn("Show %1 more", "Show %1 more", groups.length - SHOWN_CHARTS));
    this.show.hidden = groups.length <= SHOWN_CHARTS;
    this.show.setAttribute("aria-expanded", String(this.all));
    set(this.undrawn, undrawn(state));
    this.more.hidden = this.show.hidden && !this.undrawn.textContent;
  }
}
