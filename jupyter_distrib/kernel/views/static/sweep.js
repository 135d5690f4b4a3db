// A sweep in the page: an anywidget. A line for each configuration, the best on top, charts with a line for each, and
// parallel coordinates: an axis for each name that is swept and one for the metric.

import { Charts, lineStyle } from "./charts.js";
import { copyText, drawing, element, fill, section, set } from "./dom.js";
import { t, tn } from "./say.js";
import { digits, ownValue } from "./words.js";

const PARALLEL = { width: 600, height: 150, edge: 8 };

/** The ratio of the largest to the smallest value from which an axis is logarithmic. */
const LOGARITHMIC = 50;

/**
 * Where each value is on its axis, 0 to 1 from below: numbers by size, logarithmic if they are positive and far apart, others in the
 * order in which they come; null without one.
 */
export function placesOn(values) {
  const known = values.filter((value) => value !== null && value !== "");
  const numbers = known.map(Number);
  if (known.length && numbers.every(Number.isFinite)) {
    const scale = Math.min(...numbers) > 0 && Math.max(...numbers) >= LOGARITHMIC * Math.min(...numbers) ? Math.log : Number;
    const [low, high] = [scale(Math.min(...numbers)), scale(Math.max(...numbers))];
    return values.map((value) => (value === null || value === "" ? null : high > low ? (scale(Number(value)) - low) / (high - low) : 0.5));
  }
  const kinds = [...new Set(known)];
  return values.map((value) => (kinds.includes(value) ? (kinds.length > 1 ? kinds.indexOf(value) / (kinds.length - 1) : 0.5) : null));
}

/** The lines of parallel coordinates: `{axes: [{name, x, low, high}], paths}`, a path for each row; empty of one without a metric. */
export function parallelOf(rows, names, metric) {
  const { width, height, edge } = PARALLEL;
  const of = [...names, metric].map((name, place) => ({ name, values: rows.map((row) => (place < names.length ? row.swept[name] : ownValue(row.numbers, metric) ?? null)) }));
  const axes = of.map(({ name, values }, place) => {
    const places = placesOn(values);
    const write = (value) => (typeof value === "number" ? digits(value) : String(value ?? ""));
    const at = (end) => write(values[places.indexOf(end)]);
    return { name, places, x: edge + (place * (width - 2 * edge)) / Math.max(1, of.length - 1), low: at(0), high: at(1) };
  });
  const y = (place) => height - edge - place * (height - 2 * edge);
  const path = (row) => `M${axes.map(({ x, places }) => `${x.toFixed(1)} ${y(places[row]).toFixed(1)}`).join("L")}`;
  return { axes, paths: rows.map((_, row) => (axes.every(({ places }) => places[row] !== null) ? path(row) : "")) };
}

/** The table as text that spreadsheets and `pandas.read_clipboard` read. */
export function asText({ rows, names, metrics }) {
  const plain = (value) => String(value ?? "").replace(/[\t\n\r]+/g, " ");
  const lines = rows.map((row) => [...names.map((name) => row.swept[name]), ...metrics.map((name) => ownValue(row.numbers, name)), row.state]);
  return [[...names, ...metrics, "state"], ...lines].map((line) => line.map(plain).join("\t")).join("\n");
}

class Sweep {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.frame = 0;
    root.className = "jd-run jd-sweep";
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", t("Sweep"));
    const head = root.appendChild(element("div", "jd-head"));
    this.title = head.appendChild(element("span", "jd-title"));
    this.copy = head.appendChild(this.button(t("Copy table"), t("Copy all configurations and metrics; pandas.read_clipboard() makes a DataFrame of them"), () => void this.copyAll()));
    this.table = root.appendChild(element("div", "jd-rows")).appendChild(element("table"));
    this.head = this.table.appendChild(element("thead")).appendChild(element("tr"));
    this.body = this.table.appendChild(element("tbody"));
    this.parallel = root.appendChild(section("jd-parallel", t("Configurations and metric")));
    this.svg = this.parallel.appendChild(drawing("svg", { role: "img", viewBox: `0 0 ${PARALLEL.width} ${PARALLEL.height}`, preserveAspectRatio: "none" }));
    this.axes = this.parallel.appendChild(element("div", "jd-ticks"));
    this.charts = new Charts(root.appendChild(section("jd-charts", t("Reported numbers"))), this.later, { name: (place) => this.state.labels[place] ?? "" });
  }

  button(text, title, act) {
    const node = element("button", "jd-tool");
    node.type = "button";
    node.title = title;
    set(node, text);
    node.addEventListener("click", act);
    return node;
  }

  later = () => {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paint());
  };

  paint() {
    this.frame = 0;
    const state = (this.state = this.model.get("state"));
    if (!state?.rows) return;
    const { rows, names, metrics } = state;
    const ended = rows.filter(({ ended }) => ended).length;
    set(this.title, tn("%2 of %1 run ended", "%2 of %1 runs ended", rows.length, ended));
    fill(this.head, [...names, ...metrics, t("state"), t("progress")], () => element("th"), set);
    for (const node of this.head.children) node.colSpan = node === this.head.lastChild ? 2 : 1; // above the buttons, too
    fill(this.body, rows, () => element("tr"), (node, row) => this.paintRow(node, row, names, metrics));
    this.paintParallel(state);
    this.charts.paint({ ranks: state.ranks });
  }

  paintRow(node, row, names, metrics) {
    node.dataset.run = row.run;
    const texts = [...names.map((name) => row.swept[name]), ...metrics.map((name) => ownValue(row.texts, name) ?? ""), row.state, row.reason || row.progress];
    while (node.children.length > texts.length + 1) node.firstChild.remove();
    while (node.children.length < texts.length + 1) node.prepend(element("td"));
    texts.forEach((text, place) => set(node.children[place], text));
    const last = node.lastChild;
    if (!last.firstChild) {
      last.append(this.button(t("Open"), t("Open the page of this run"), () => this.request("open", node.dataset.run)), this.button(t("Stop"), t("Stop this run"), () => this.request("stop", node.dataset.run)));
    }
    last.firstChild.hidden = row.waits;
    last.lastChild.hidden = row.ended;
  }

  paintParallel({ rows, names, metric }) {
    const { axes, paths } = metric ? parallelOf(rows, names, metric) : { axes: [], paths: [] };
    this.parallel.hidden = paths.filter(Boolean).length < 2; // one line compares nothing
    if (this.parallel.hidden) return;
    const { height, edge } = PARALLEL;
    const rules = axes.map(({ x }) => drawing("line", { class: "jd-grid", x1: x, x2: x, y1: edge, y2: height - edge }));
    const lines = paths.flatMap((d, place) => (d ? [this.line(d, rows[place], place)] : [])).reverse(); // the best on top
    this.svg.replaceChildren(...rules, ...lines);
    this.svg.setAttribute("aria-label", t("%1 by %2; the best is %3", metric, names.join(", "), rows[0].label));
    fill(this.axes, axes, () => element("span"), (node, { name, low, high }) => set(node, `${name} ${low === high ? low : `${low} - ${high}`}`));
  }

  line(d, { place, label }, order) {
    const node = drawing("path", { d, class: order ? "jd-each" : "jd-each jd-top", "vector-effect": "non-scaling-stroke" });
    node.style.cssText = lineStyle(place);
    node.appendChild(drawing("title", {})).textContent = label;
    return node;
  }

  async copyAll() {
    set(this.copy, (await copyText(asText(this.state))) ? t("Copied") : t("Not copied"));
    setTimeout(() => set(this.copy, t("Copy table")), 1500);
  }

  /** Whoever can reach the kernel while the cell runs takes the event; else the widget's own channel is tried. */
  request(op, run) {
    const detail = { run, force: false };
    const taken = !this.root.dispatchEvent(new CustomEvent(`jupyter-distrib:${op}`, { detail, bubbles: true, cancelable: true, composed: true }));
    if (!taken) this.model.send({ op, ...detail });
  }
}

export default {
  render({ model, el }) {
    const view = new Sweep(model, el.appendChild(element("div")));
    model.on("change:state", view.later);
    view.paint();
    return () => {
      cancelAnimationFrame(view.frame);
      model.off("change:state", view.later);
    };
  },
};
