// The run in the page: an anywidget. Plain DOM, painted at most once per animation frame; nodes are made once and only
// their texts change, so that focus and selection stay where they are.

import { FINISHED, GLYPHS, addressed, assemble, behind, failures, notes, order, places, row, runLeft, stacks, steadyLoops, stopping, summary, title } from "./state.js";
import { clock } from "./words.js";
import { Logs } from "./lines.js";
import { Row } from "./ranks.js";
import { Charts } from "./charts.js";
import { Heat } from "./heat.js";
import { Shares } from "./strips.js";
import { Card } from "./displays.js";
import { element, fill, section, set, setLinked } from "./dom.js";
import { Output, noteSelection } from "./output.js";
import { t, tn } from "./say.js";
import { Tools } from "./tools.js";

const TILES_FROM = 17; // with more ranks than 16, a rank is a tile
const STATUS_EVERY_MS = 1000;
const FAILURE_LINES = 3; // of a message; further ones are folded
const gone = () => t("The kernel has ended, or was restarted, in the middle of this run. This is the last known state.");

const RUNS = 20; // whose stores are kept

// run -> its lines, its clock, and when it or its kernel ended. Views of one run share them; by the run and not by the model,
// because anywidget gives each view an object of its own for the model.
const stores = new Map();

function makeStore(model) {
  const store = { logs: new Logs(), startedMs: performance.now() - 1000 * (model.get("clock")?.elapsed_s ?? 0), endedMs: null, goneMs: null };
  const take = () => {
    store.goneMs = null;
    if (model.get("head")?.ended) store.endedMs ??= performance.now();
    store.logs.take((key) => model.get(key));
  };
  model.on("change", take);
  model.on("comm_live_update", () => (store.goneMs ??= performance.now())); // ipywidgets' models say it when they lose their kernel
  take();
  const run = model.get("head")?.run;
  stores.delete(run); // a page that lost the run and found it again has a new model
  stores.set(run, store);
  if (stores.size > RUNS) stores.delete(stores.keys().next().value);
  return store;
}

function storeOf(model) {
  return stores.get(model.get("head")?.run) ?? makeStore(model);
}

class View {
  constructor(model, root) {
    this.model = model;
    this.store = storeOf(model);
    this.root = root;
    this.rows = new Map();
    this.cards = new Map();
    this.loops = new Map(); // of each rank, as they were painted
    this.asked = "";
    this.said = "";
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
    this.left = head.appendChild(element("span", "jd-clock jd-left"));
    this.chips = head.appendChild(element("span", "jd-chips"));
    this.stage = head.appendChild(element("span", "jd-stage"));
    this.where = head.appendChild(element("button", "jd-where"));
    this.where.type = "button";
    this.where.title = t("Show where each rank is now in its Python code");
    set(this.where, t("Where?"));
    this.where.addEventListener("click", () => this.request("stacks"));
    this.stop = head.appendChild(element("button", "jd-stop"));
    this.stop.type = "button";
    this.stop.addEventListener("click", () => this.askToStop());
    this.hint = root.appendChild(element("div", "jd-hint"));
    this.status = root.appendChild(element("div", "jd-aloud"));
    this.status.setAttribute("role", "status");
    this.notes = root.appendChild(element("div", "jd-notes"));
    this.stall = root.appendChild(section("jd-stall", t("Nothing moves")));
    this.failures = root.appendChild(section("jd-failures", t("What went wrong")));
    this.stacks = root.appendChild(section("jd-stacks", t("Where the ranks are")));
    this.list = root.appendChild(element("ul", "jd-ranks"));
    this.list.setAttribute("aria-label", t("Ranks"));
    this.shares = new Shares(root.appendChild(section("jd-shares", t("Where the time goes"))));
    this.heat = new Heat(root.appendChild(section("jd-timeline", t("Ranks over time"))));
    this.charts = new Charts(root.appendChild(section("jd-charts", t("Reported numbers"))), this.later);
    this.shown = root.appendChild(section("jd-shown", t("Displays of the ranks")));
    this.output = new Output(t("Output of all ranks"), null, new Tools(() => this.openLog()));
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
    for (const rank of state.ranks) {
      if (rank.state === "running") rank.progress = steadyLoops(this.loops.get(rank.rank), rank.progress);
      this.loops.set(rank.rank, rank.progress);
    }
    this.paintHead(state);
    const late = behind(state);
    this.paintRanks(state, late);
    this.shares.paint(state.shares ?? null);
    this.heat.paint(state.course);
    this.charts.paint(state);
    this.paintDisplays(state);
    this.output.paint(this.store.logs.all, state.ranks.flatMap((rank) => rank.unfinished), state);
  };

  paintHead(state) {
    this.root.setAttribute("aria-label", t("Run %1 of %2", state.run, state.label));
    const states = state.ranks.map((rank) => rank.state);
    const bad = states.some((name) => name === "failed" || name === "lost");
    const lost = this.store.goneMs !== null && !state.ended;
    const whole = bad ? "failed" : lost ? "interrupted" : state.stall ? "stalled" : ["running", "starting", "waiting", "interrupted", "done"].find((name) => states.includes(name));
    this.root.dataset.state = whole;
    set(this.mark, GLYPHS[whole] ?? "▲");
    set(this.title, title(state));
    set(this.clock, clock(((this.store.endedMs ?? this.store.goneMs ?? performance.now()) - this.store.startedMs) / 1000));
    set(this.left, lost ? "" : runLeft(state));
    const finished = states.filter((name) => FINISHED.has(name)).length;
    set(this.chips, finished ? tn("%2 of %1 finished", "%2 of %1 finished", states.length, finished) : "");
    const stage = lost ? "" : stopping(state, this.asked);
    set(this.stage, stage);
    set(this.stop, stage ? t("Kill") : t("Stop"));
    this.stop.title = stage ? t("End the ranks that have not stopped; what they keep is lost") : t("Stop all ranks; what they keep stays");
    this.stop.disabled = this.where.disabled = lost || finished === states.length;
    fill(this.notes, [...(lost ? [gone()] : []), ...notes(state)], () => element("div"), (node, text) => setLinked(node, addressed(`· ${text}`)));
    this.paintStall(state.stall);
    fill(this.failures, failures(state), newFailure, paintFailure);
    fill(this.stacks, stacks(state), newStack, paintStack);
    this.say(lost ? gone() : summary(state, this.asked));
  }

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
    const focused = this.root.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement) : null;
    ranks.forEach((rank, index) => {
      if (!this.rows.has(rank.rank)) this.rows.set(rank.rank, new Row(rank.rank));
      const each = this.rows.get(rank.rank);
      if (this.list.children[index] !== each.root) this.list.insertBefore(each.root, this.list.children[index] ?? null);
      each.paint(row(rank, late.get(rank.rank), state.cause ?? null, Boolean(state.stall)), this.store.logs.of(rank.rank), rank.unfinished, state);
    });
    if (focused && document.activeElement !== focused) focused.focus({ preventScroll: true });
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

  askToStop() {
    const force = Boolean(this.asked || this.model.get("head").stopping);
    this.asked = force ? "killed" : "asked";
    if (!this.request("stop", { force })) set(this.hint, t("If the ranks go on, press the notebook's own Stop button (■): it always works."));
    this.later();
  }

  openLog() {
    const run = this.model.get("head").run;
    const detail = { run };
    const taken = !this.root.dispatchEvent(new CustomEvent("jupyter-distrib:log", { detail, bubbles: true, cancelable: true, composed: true }));
    if (!taken) set(this.hint, t("Here, %1 in a cell shows all that the ranks wrote.", `%distributed_logs ${run}`));
  }

  /** Whoever can reach the kernel while a cell runs takes the event; else the widget's own channel is tried. */
  request(op, more = {}) {
    const detail = { run: this.model.get("head").run, ...more };
    const taken = !this.root.dispatchEvent(new CustomEvent(`jupyter-distrib:${op}`, { detail, bubbles: true, cancelable: true, composed: true }));
    if (!taken) this.model.send({ op, ...detail });
    return taken;
  }
}

/** What went wrong on some ranks: the first lines, and the others on a click. */
function newFailure() {
  const node = element("div", "jd-failure");
  node.append(element("span"), element("details"));
  node.lastChild.append(element("summary"), element("pre"));
  return node;
}

function paintFailure(node, text) {
  const lines = text.split("\n");
  const shown = lines.length > FAILURE_LINES + 1 ? lines.slice(0, FAILURE_LINES) : lines;
  const more = lines.slice(shown.length);
  set(node.firstChild, shown.join("\n"));
  node.lastChild.hidden = !more.length;
  set(node.lastChild.firstChild, tn("%1 more line", "%1 more lines", more.length));
  set(node.lastChild.lastChild, more.join("\n"));
}

function newStack() {
  const node = element("details", "jd-stack");
  node.open = true;
  node.append(element("summary"), element("pre"));
  return node;
}

function paintStack(node, { title, lines }) {
  set(node.children[0], title);
  set(node.children[1], lines.join("\n"));
  node.children[1].hidden = !lines.length;
}

export default {
  initialize({ model }) {
    makeStore(model); // lines are collected from the beginning, whether or not they can be seen
  },
  render({ model, el }) {
    const view = new View(model, el.appendChild(element("div")));
    for (const event of ["change", "comm_live_update"]) model.on(event, view.later);
    const select = () => noteSelection(); // one of this view's own, which can be taken away
    document.addEventListener("selectionchange", select);
    const ticking = setInterval(view.later, 1000); // the clock, and what was put off
    view.paint();
    return () => {
      clearInterval(ticking);
      document.removeEventListener("selectionchange", select);
      cancelAnimationFrame(view.frame);
      for (const event of ["change", "comm_live_update"]) model.off(event, view.later);
    };
  },
};
