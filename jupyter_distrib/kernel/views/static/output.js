// What ranks print, line by line, with equal lines of several ranks as one. What they print is text here.

import { element, fill, set, setParts } from "./dom.js";
import { fold, matches, whose } from "./lines.js";
import { t, tn } from "./say.js";
import { partsOf } from "./styles.js";

const SHOWN_LINES = 100;
const SHOWN_OF_RANK = 500;
const OUTPUT_EVERY_MS = 200;
const AT_THE_END = 4; // pixels

let selected = null; // the node in which the user's selection begins; asking for it in a frame would lay out the page

/** To be called when the selection changes. */
export function noteSelection() {
  const selection = getSelection();
  selected = selection && !selection.isCollapsed ? selection.anchorNode : null;
}

/** Lines, the newest at the bottom, where the view stays unless somebody scrolls away; stands still under a selection. */
export class Output {
  /** `rank` is null for several ranks; `tools` is the bar above; `most` lines are shown. */
  constructor(label, rank = null, tools = null, most = rank === null ? SHOWN_LINES : SHOWN_OF_RANK) {
    this.rank = rank;
    this.tools = tools;
    this.most = most;
    this.root = element("div", "jd-box");
    this.root.hidden = true;
    if (tools) this.root.append(tools.root);
    this.box = this.root.appendChild(element("div", "jd-output"));
    this.box.setAttribute("role", "log");
    this.box.setAttribute("aria-live", "off");
    this.box.setAttribute("aria-label", label);
    this.box.tabIndex = 0;
    const inner = this.box.appendChild(element("div")); // the style sheet turns the order round: the end is what is seen
    inner.append((this.gap = element("div")), (this.lines = element("div")), (this.none = element("div", "jd-none")));
    this.painted = [];
    this.paintedMs = 0;
    this.held = null; // what is shown
    this.seen = [];
    if (tools) this.follow(tools);
  }

  follow(tools) {
    tools.changed = () => {
      this.box.classList.toggle("jd-unwrapped", !tools.wraps);
      if (tools.following) this.held = this.last;
      if (this.held) this.paintNow();
      if (tools.following) this.box.scrollTop = 0; // the end, as the order is turned round
    };
    tools.copied = () => this.folded(this.seen, this.state).map((line) => this.asText(line)).join("\n");
    this.box.addEventListener("scroll", () => tools.setFollowing(this.box.scrollTop > -AT_THE_END));
  }

  /** `unfinished` are lines that may still change. False if it is put off: the caller comes again. */
  paint(finished, unfinished, state) {
    const now = performance.now();
    const painted = [finished.length, finished[finished.length - 1], unfinished.map(({ text }) => text).join("\n")];
    if (painted.every((each, index) => each === this.painted[index])) return true;
    if (now - this.paintedMs < OUTPUT_EVERY_MS || this.root.contains(selected)) return false;
    [this.painted, this.paintedMs] = [painted, now];
    this.last = { lines: [...finished, ...unfinished], finished, end: finished[finished.length - 1], state };
    if (this.tools?.following !== false || !this.held) this.held = this.last;
    this.paintNow();
    return true;
  }

  /** Paint what the user has asked for: it is not put off, and is shown also where the box stands still. */
  paintAsked(finished, state) {
    this.held = this.last = { lines: finished, finished, end: finished[finished.length - 1], state };
    this.paintNow();
  }

  /** How many lines have come since the box stands still. */
  waiting() {
    return this.held === this.last ? 0 : this.last.finished.length - 1 - this.last.finished.lastIndexOf(this.held.end);
  }

  paintNow() {
    const { lines, state } = this.held;
    this.state = state;
    const filter = this.tools?.filtering ? this.tools.filter : null;
    this.seen = filter ? lines.filter((line) => line.skipped || matches(line, filter)) : lines;
    const shown = this.seen.slice(-this.most);
    const before = this.seen.slice(0, -this.most).reduce((count, line) => count + (line.skipped || 1), 0);
    const folded = this.folded(shown, state);
    const left = new Set(folded.map((line) => line.first));
    for (const node of [...this.lines.children]) if (!left.has(node.first)) node.remove(); // lines move up, they are not written anew
    const paint = (node, line) => paintLine(node, line, this.rank, state, Boolean(filter));
    fill(this.gap, before ? [{ skipped: before }] : [], newLine, paint);
    fill(this.lines, folded, newLine, paint);
    set(this.none, filter && !folded.length ? t("No line matches.") : "");
    this.root.hidden = !lines.length;
    this.tools?.tell(this.seen.filter((line) => !line.skipped).length, this.waiting());
  }

  folded(lines, state) {
    return this.rank === null && state.ranks.length > 1 ? fold(lines) : lines.map((line) => ({ ...line, first: line, ranks: [line.rank] }));
  }

  asText(line) {
    if (line.skipped) return skippedText(line.skipped, this.rank, this.state, false);
    return this.rank === null ? `[${whose(line.ranks, this.state)}] ${line.text}` : line.text;
  }
}

function newLine() {
  const node = element("div", "jd-line");
  node.append(element("span", "jd-who"), element("span", "jd-text"));
  return node;
}

function skippedText(count, rank, state, searching) {
  const command = `%distributed_logs ${state.run}${rank === null ? "" : ` --rank ${rank}`}`;
  const number = count.toLocaleString("en");
  return searching
    ? tn("… %2 line is not searched here; %3 shows all", "… %2 lines are not searched here; %3 shows all", count, number, command)
    : tn("… %2 line not shown here; %3 shows all", "… %2 lines not shown here; %3 shows all", count, number, command);
}

function paintLine(node, line, rank, state, searching) {
  const [who, text] = node.children;
  node.first = line.first;
  node.dataset.stream = line.skipped ? "gap" : line.stream;
  set(who, line.skipped || rank !== null ? "" : whose(line.ranks, state));
  if (line.skipped) set(text, skippedText(line.skipped, rank, state, searching && line.first));
  else if (line.spans || text.parts) setParts(text, partsOf(line));
  else set(text, line.text);
}
