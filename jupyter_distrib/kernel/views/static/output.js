// What ranks print, line by line, with equal lines of several ranks as one. What they print is text here.

import { element, fill, set, setParts } from "./dom.js";
import { fold, whose } from "./lines.js";
import { partsOf } from "./styles.js";

const SHOWN_LINES = 100;
const SHOWN_OF_RANK = 500;
const OUTPUT_EVERY_MS = 200;

let selected = null; // the node in which the user's selection begins; asking for it in a frame would lay out the page

/** To be called when the selection changes. */
export function noteSelection() {
  const selection = getSelection();
  selected = selection && !selection.isCollapsed ? selection.anchorNode : null;
}

/** Lines, the newest at the bottom, where the view stays unless somebody scrolls away; stands still under a selection. */
export class Output {
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
    this.painted = [];
    this.paintedMs = 0;
  }

  /** `unfinished` are lines that may still change. */
  paint(finished, unfinished, state) {
    const now = performance.now();
    const painted = [finished.length, finished[finished.length - 1], unfinished.map(({ text }) => text).join("\n")];
    if (painted.every((each, index) => each === this.painted[index])) return;
    if (now - this.paintedMs < OUTPUT_EVERY_MS || this.root.contains(selected)) return;
    [this.painted, this.paintedMs] = [painted, now];
    const lines = [...finished, ...unfinished];
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
  if (line.skipped) set(text, `… ${line.skipped.toLocaleString("en")} line${line.skipped === 1 ? "" : "s"} not shown here; ${command} shows all`);
  else if (line.spans || text.parts) setParts(text, partsOf(line));
  else set(text, line.text);
}
