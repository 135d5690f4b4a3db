// The run in the page: an anywidget. Plain DOM, painted at most once per animation frame; nodes are made once and only
// their texts change, so that focus and selection stay where they are.
//
// What ranks print or display is text here, an image that carries its data, or HTML in a frame in which nothing can run.

import { FINISHED, GLYPHS, Logs, assemble, behind, clock, failures, fold, notes, order, places, row, stopping, summary, title, whose } from "./state.js";
import { Chart, chartNames, element, set } from "./chart.js";

const TILES_FROM = 17; // with more ranks than 16, a rank is a tile
const SHOWN_LINES = 100;
const SHOWN_OF_RANK = 500;
const SHOWN_CHARTS = 6;
const STATUS_EVERY_MS = 1000;
const OUTPUT_EVERY_MS = 200;
const GONE = "The kernel has ended, or was restarted, in the middle of this run. This is what was seen last.";
const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

let selected = null; // the node in which the user's selection begins; asking for it in a frame would lay out the page
const stores = new WeakMap(); // model -> its lines, its clock, and when its kernel was gone; several views share them

function storeOf(model) {
  if (!stores.has(model)) {
    const store = { logs: new Logs(), startedMs: performance.now() - 1000 * (model.get("clock")?.elapsed_s ?? 0), goneMs: null };
    const take = () => {
      store.goneMs = null;
      store.logs.take((key) => model.get(key));
    };
    model.on("change", take);
    model.on("comm_live_update", () => (store.goneMs ??= performance.now())); // ipywidgets' models say it when they lose their kernel
    take();
    stores.set(model, store);
  }
  return stores.get(model);
}

class View {
  constructor(model, root) {
    this.model = model;
    this.store = storeOf(model);
    this.root = root;
    this.rows = new Map();
    this.charts = new Map();
    this.cards = new Map();
    this.asked = "";
    this.frame = 0;
    this.saidMs = -Infinity;
    this.build();
  }

  build() {
    const { root } = this;
    root.classList.add("jd-run");
    root.setAttribute("role", "group");
    const head = root.appendChild(element("div", "jd-head"));
    this.mark = head.appendChild(element("span", "jd-mark"));
    this.mark.setAttribute("aria-hidden", "true");
    this.title = head.appendChild(element("span", "jd-title"));
    this.clock = head.appendChild(element("span", "jd-clock"));
    this.clock.setAttribute("role", "timer");
    this.chips = head.appendChild(element("span", "jd-chips"));
    this.stage = head.appendChild(element("span", "jd-stage"));
    this.stop = head.appendChild(element("button", "jd-stop"));
    this.stop.type = "button";
    this.stop.addEventListener("click", () => this.askToStop());
    this.hint = root.appendChild(element("div", "jd-hint"));
    this.status = root.appendChild(element("div", "jd-aloud"));
    this.status.setAttribute("role", "status");
    this.notes = root.appendChild(element("div", "jd-notes"));
    this.stall = root.appendChild(section("jd-stall", "Nothing moves"));
    this.failures = root.appendChild(section("jd-failures", "What went wrong"));
    this.list = root.appendChild(element("ul", "jd-ranks"));
    this.list.setAttribute("aria-label", "Ranks");
    this.chartArea = root.appendChild(section("jd-charts", "Metrics over steps"));
    this.shown = root.appendChild(section("jd-shown", "Displays of the ranks"));
    this.output = new Output("Output of all ranks");
    root.append(this.output.root);
  }

  /** Paint in the next frame; a page that is not visible has none. */
  later = () => {
    if (!this.frame) this.frame = requestAnimationFrame(this.paint);
  };

  paint = () => {
    this.frame = 0;
    const state = assemble((key) => this.model.get(key));
    if (!state) return;
    this.paintHead(state);
    const late = behind(state);
    this.paintRanks(state, late);
    this.paintCharts(state);
    this.paintDisplays(state);
    this.output.paint(this.store.logs.all, this.store.logs.changes, state);
  };

  paintHead(state) {
    this.root.setAttribute("aria-label", `Run ${state.run} of ${state.label}`);
    const states = state.ranks.map((rank) => rank.state);
    const bad = states.some((name) => name === "failed" || name === "lost");
    const gone = this.store.goneMs !== null;
    const whole = bad ? "failed" : gone ? "interrupted" : state.stall ? "stalled" : ["running", "starting", "waiting", "interrupted", "done"].find((name) => states.includes(name));
    this.root.dataset.state = whole;
    set(this.mark, GLYPHS[whole] ?? "▲");
    set(this.title, title(state));
    set(this.clock, clock(((this.store.goneMs ?? performance.now()) - this.store.startedMs) / 1000));
    const finished = states.filter((name) => FINISHED.has(name)).length;
    set(this.chips, finished ? `${finished} of ${states.length} finished` : "");
    const stage = gone ? "" : stopping(state, this.asked);
    set(this.stage, stage);
    set(this.stop, stage ? "Kill" : "Stop");
    this.stop.title = stage ? "End the ranks that have not stopped; what they keep is lost" : "Stop all ranks; what they keep stays";
    this.stop.disabled = gone || finished === states.length;
    fill(this.notes, [...(gone ? [GONE] : []), ...notes(state)], () => element("div"), (node, text) => set(node, `· ${text}`));
    this.paintStall(state.stall);
    fill(this.failures, failures(state), () => element("div", "jd-failure"), set);
    this.say(gone ? GONE : summary(state, this.asked));
  }

  select = () => {
    const selection = getSelection();
    selected = selection && !selection.isCollapsed ? selection.anchorNode : null;
  };

  paintStall(stall) {
    const lines = stall ? [{ text: stall.text }, ...places(stall)] : [];
    fill(this.stall, lines, () => element("div"), (node, { text, waiting }) => {
      node.className = waiting === undefined ? "jd-stall-text" : waiting ? "jd-place" : "jd-place jd-suspect";
      set(node, text);
    });
  }

  /** The polite region: at most once a second, and only what is new. */
  say(text) {
    const now = performance.now();
    if (text === this.said || now - this.saidMs < STATUS_EVERY_MS) return;
    [this.said, this.saidMs] = [text, now];
    set(this.status, text);
  }

  paintRanks(state, late) {
    this.list.classList.toggle("jd-tiles", state.ranks.length >= TILES_FROM);
    const ranks = order(state, late);
    const focused = this.root.contains(document.activeElement) ? document.activeElement : null;
    ranks.forEach((rank, index) => {
      if (!this.rows.has(rank.rank)) this.rows.set(rank.rank, new Row(rank.rank));
      const each = this.rows.get(rank.rank);
      if (this.list.children[index] !== each.root) this.list.insertBefore(each.root, this.list.children[index] ?? null);
      each.paint(row(rank, late.get(rank.rank)), this.store.logs, state);
    });
    if (focused && document.activeElement !== focused) focused.focus({ preventScroll: true });
  }

  paintCharts(state) {
    for (const name of chartNames(state).slice(0, SHOWN_CHARTS)) {
      if (!this.charts.has(name)) {
        this.charts.set(name, new Chart(name));
        this.chartArea.append(this.charts.get(name).root);
      }
      const chart = this.charts.get(name);
      const seen = state.ranks.map((rank) => rank.columns);
      if (!chart.seen || seen.some((columns, index) => columns !== chart.seen[index])) chart.paint(state);
      chart.seen = seen;
    }
    this.chartArea.hidden = !this.charts.size;
  }

  paintDisplays(state) {
    const ranks = state.ranks.filter((rank) => rank.displays.length);
    for (const rank of ranks) {
      if (!this.cards.has(rank.rank)) {
        const card = new Card(rank.rank);
        const after = [...this.cards.keys()].filter((number) => number > rank.rank).sort((a, b) => a - b)[0];
        this.shown.insertBefore(card.root, this.cards.get(after)?.root ?? null);
        this.cards.set(rank.rank, card);
      }
      this.cards.get(rank.rank).paint(rank);
    }
    for (const [number, card] of this.cards) {
      if (ranks.some((rank) => rank.rank === number)) continue;
      card.root.remove();
      this.cards.delete(number);
    }
    this.shown.hidden = !ranks.length;
  }

  /** Whoever can reach the kernel while a cell runs takes the event; else the widget's own channel is tried. */
  askToStop() {
    const detail = { run: this.model.get("head").run, force: Boolean(this.asked || this.model.get("head").stopping) };
    this.asked = detail.force ? "killed" : "asked";
    const event = new CustomEvent("jupyter-distrib:stop", { detail, bubbles: true, cancelable: true, composed: true });
    if (this.root.dispatchEvent(event)) {
      this.model.send({ op: "stop", ...detail });
      set(this.hint, "If the ranks go on, press the notebook's own Stop button (■): it always works.");
    }
    this.later();
  }
}

/** One rank: a line, or a tile among many. */
class Row {
  constructor(rank) {
    this.rank = rank;
    this.root = element("li", "jd-rank");
    this.button = this.root.appendChild(element("button", "jd-no"));
    this.button.type = "button";
    this.button.setAttribute("aria-expanded", "false");
    for (const part of ["state", "usage", "outer", "bars", "metrics", "last"]) this[part] = this.root.appendChild(element("span", `jd-${part}`));
    this.root.addEventListener("click", (event) => {
      if (!event.target.closest(".jd-output") && !String(getSelection())) this.toggle();
    });
  }

  toggle() {
    this.open = !this.open;
    this.root.classList.toggle("jd-open", this.open);
    this.button.setAttribute("aria-expanded", String(this.open));
    if (this.open && !this.output) this.output = new Output(`Output of rank ${this.rank}`, this.rank);
    if (this.open) this.root.append(this.output.root);
    else this.output.root.remove();
    this.paint(...this.painted);
  }

  paint(said, logs, state) {
    this.painted = [said, logs, state];
    this.root.dataset.state = said.state;
    this.root.classList.toggle("jd-late", Boolean(said.behind));
    set(this.button, String(said.rank));
    this.button.setAttribute("aria-label", `Rank ${said.rank}, ${said.state}: show its output`);
    fill(this.state, [GLYPHS[said.state], said.behind || said.state], () => element("span"), set);
    this.state.firstChild?.setAttribute("aria-hidden", "true");
    fill(this.usage, said.memory ? [said.device, said.memory, said.busy] : [said.device], () => element("span"), set);
    this.usage.title = said.usage;
    set(this.outer, said.outer.join(" · "));
    fill(this.bars, said.bars, newBar, paintBar);
    const metrics = said.metrics.length ? said.metrics : said.bars.filter((bar) => bar.detail).map((bar) => ["", bar.detail]);
    fill(this.metrics, this.open ? metrics : metrics.slice(0, 4), newMetric, paintMetric);
    this.metrics.title = metrics.map((metric) => metric.join(" ").trim()).join(", ");
    set(this.last, said.trouble || said.last);
    this.last.title = said.trouble || said.last;
    if (this.open) this.output.paint(logs.of(this.rank), logs.changes, state);
  }
}

function newBar() {
  const node = element("span", "jd-bar");
  const track = node.appendChild(element("span", "jd-track"));
  track.setAttribute("role", "progressbar");
  track.append(element("span", "jd-filled"));
  node.append(element("span", "jd-steps"), element("span", "jd-rate"), element("span", "jd-percent"));
  return node;
}

function paintBar(node, bar) {
  const [track, steps, rate, percent] = node.children;
  track.hidden = bar.fraction === null;
  track.firstChild.style.transform = `scaleX(${(bar.fraction ?? 0).toFixed(3)})`;
  track.setAttribute("aria-label", bar.label || "progress");
  track.setAttribute("aria-valuenow", Math.round(100 * (bar.fraction ?? 0)));
  track.setAttribute("aria-valuetext", `${bar.steps} ${bar.left}`.trim());
  set(steps, bar.label ? `${bar.label} ${bar.steps}` : bar.steps);
  set(rate, [bar.rate, bar.left].filter(Boolean).join(", "));
  set(percent, bar.percent);
}

function newMetric() {
  const node = element("span", "jd-metric");
  node.append(element("span", "jd-name"), element("span", "jd-value"));
  return node;
}

function paintMetric(node, [name, value]) {
  set(node.children[0], name);
  set(node.children[1], value);
}

/** Lines, the newest at the bottom, where the view stays unless somebody scrolls away; stands still under a selection. */
class Output {
  constructor(label, rank = null) {
    this.rank = rank;
    this.root = element("div", "jd-output");
    this.root.setAttribute("role", "log");
    this.root.setAttribute("aria-live", "off");
    this.root.setAttribute("aria-label", label);
    this.root.tabIndex = 0;
    this.root.hidden = true;
    const inner = this.root.appendChild(element("div")); // the style sheet turns the order round: the end is what is seen
    inner.append((this.gap = element("div")), (this.lines = element("div")));
    this.painted = -1;
    this.paintedMs = 0;
  }

  paint(lines, changes, state) {
    const now = performance.now();
    if (changes === this.painted || now - this.paintedMs < OUTPUT_EVERY_MS || this.root.contains(selected)) return;
    [this.painted, this.paintedMs] = [changes, now];
    const most = this.rank === null ? SHOWN_LINES : SHOWN_OF_RANK;
    const shown = lines.slice(-most);
    const before = lines.slice(0, -most).reduce((count, line) => count + (line.skipped || 1), 0);
    const folded = this.rank === null ? fold(shown) : shown.map((line) => ({ ...line, first: line }));
    const left = new Set(folded.map((line) => line.first));
    for (const node of [...this.lines.children]) if (!left.has(node.first)) node.remove(); // lines move up, they are not written anew
    fill(this.gap, before ? [{ skipped: before }] : [], newLine, (node, line) => paintLine(node, line, this.rank, state));
    fill(this.lines, folded, newLine, (node, line) => paintLine(node, line, this.rank, state));
    this.root.hidden = !folded.length;
  }
}

function newLine() {
  const node = element("div", "jd-line");
  node.append(element("span", "jd-who"), element("span", "jd-text"));
  return node;
}

function paintLine(node, line, rank, state) {
  const [who, text] = node.children;
  node.first = line.first;
  node.dataset.stream = line.skipped ? "gap" : line.stream;
  const command = `%distributed_logs ${state.run}${rank === null ? "" : ` --rank ${rank}`}`;
  set(who, line.skipped || rank !== null ? "" : whose(line.ranks, state));
  set(text, line.skipped ? `… ${line.skipped.toLocaleString("en")} line${line.skipped === 1 ? "" : "s"} not shown here; ${command} shows all` : line.text);
}

/** What one rank displayed. */
class Card {
  constructor(rank) {
    this.root = element("figure", "jd-card");
    set(this.root.appendChild(element("figcaption")), `rank ${rank}`);
    this.rank = rank;
    this.shown = new Map();
  }

  paint({ displays, skipped_displays: skipped }) {
    const wanted = new Set(displays);
    for (const [display, node] of this.shown) if (!wanted.has(display)) (node.remove(), this.shown.delete(display));
    displays.forEach((display, index) => {
      if (!this.shown.has(display)) this.shown.set(display, displayed(display, this.rank));
      const [node, place] = [this.shown.get(display), this.root.children[index + 1]];
      if (place !== node) this.root.insertBefore(node, place ?? null);
    });
    this.root.title = skipped ? `${skipped} earlier displays are not kept` : "";
  }
}

/** The richest representation in which nothing can run. */
function displayed({ data }, rank) {
  const kind = IMAGES.find((each) => each in data);
  if (kind && /^[A-Za-z0-9+/=\s]*$/.test(data[kind])) return image(`data:${kind};base64,${data[kind]}`, rank);
  if (data["image/svg+xml"]) return image(`data:image/svg+xml;charset=utf-8,${encodeURIComponent(data["image/svg+xml"])}`, rank);
  if (data["text/html"]) return frame(data["text/html"], rank);
  const text = data["text/plain"] ?? data["text/markdown"] ?? data["text/latex"] ?? `(${Object.keys(data).join(", ")})`;
  const node = element("pre");
  // eslint-disable-next-line no-control-regex
  node.textContent = text.replace(/\x1b(\[[0-9;:?<=>!]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)/g, "");
  return node;
}

function image(source, rank) {
  const node = element("img");
  node.alt = `Picture from rank ${rank}`;
  node.src = source; // an SVG in an <img> runs no script and loads nothing
  return node;
}

/** A frame without the right to run scripts, submit forms or leave; its policy forbids loading anything, too. */
function frame(html, rank) {
  const node = element("iframe", "jd-frame");
  node.setAttribute("sandbox", "allow-same-origin"); // so that its height can be measured from here
  node.title = `HTML from rank ${rank}`;
  const policy = "default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline'";
  node.addEventListener("load", () => {
    const { body } = node.contentDocument;
    const style = getComputedStyle(node.parentElement);
    body.style.cssText = `margin: 0; width: max-content; max-width: 640px; color: ${style.color}; font: ${style.fontSize}/1.5 ${style.fontFamily}`;
    node.style.width = `${body.scrollWidth + 2}px`;
    node.style.height = `${Math.min(600, body.scrollHeight + 4)}px`;
  });
  node.srcdoc = `<!DOCTYPE html><meta http-equiv="Content-Security-Policy" content="${policy}"><style>:root{color-scheme:light dark}table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #8884}</style><body>${html}`;
  return node;
}

function section(className, label) {
  const node = element("section", className);
  node.setAttribute("aria-label", label);
  return node;
}

/** Make `parent` have one child for each item; children are used again. */
function fill(parent, items, make, write) {
  while (parent.children.length > items.length) parent.lastChild.remove();
  items.forEach((item, index) => write(parent.children[index] ?? parent.appendChild(make()), item));
  if (parent.hidden !== !items.length) parent.hidden = !items.length;
}

export default {
  initialize({ model }) {
    storeOf(model); // lines are collected from the beginning, whether or not they can be seen
  },
  render({ model, el }) {
    const view = new View(model, el.appendChild(element("div")));
    for (const event of ["change", "comm_live_update"]) model.on(event, view.later);
    document.addEventListener("selectionchange", view.select);
    const ticking = setInterval(view.later, 1000); // the clock, and what was put off
    view.paint();
    return () => {
      clearInterval(ticking);
      document.removeEventListener("selectionchange", view.select);
      cancelAnimationFrame(view.frame);
      for (const event of ["change", "comm_live_update"]) model.off(event, view.later);
    };
  },
};
