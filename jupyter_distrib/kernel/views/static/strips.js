// What ranks do over time, as strips: the last minute of each, where the time of its training goes, and how far it was
// behind over the run. `spansOf` and the texts are pure; the classes draw.

import { drawing, element, fill, set } from "./dom.js";
import { t } from "./say.js";
import { clock } from "./words.js";

const SECONDS = 60;
const TOP = 35; // the highest digit of a strip
const STRIP = { width: SECONDS, height: 16 };
const NONE = ".";

/** `["0", 12], ["2", 3]`: equal characters beside one another. */
export function spansOf(row) {
  const spans = [];
  for (const level of row) {
    if (spans.length && spans[spans.length - 1][0] === level) spans[spans.length - 1][1] += 1;
    else spans.push([level, 1]);
  }
  return spans;
}

/** The steps that a level stands for: `4-7` (`steps_of` in `timeline.py`). */
export function stepsOf(level) {
  const [low, high] = [level ? 2 ** (level - 1) : 0, 2 ** level - 1];
  return level === 9 ? t("%1 and more", low) : high > low ? `${low}-${high}` : String(low);
}

/** What the picture of a course says to those who cannot see it. */
export function courseText({ seconds, rows }) {
  const worst = rows.map(([rank, row]) => [rank, Math.max(0, ...[...row].filter((level) => level !== NONE).map(Number))]);
  const late = worst.filter(([, level]) => level > 1).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const told = late.slice(0, 8).map(([rank, level]) => t("rank %1 up to %2", rank, stepsOf(level)));
  return t("Steps behind the leading rank over %1: %2", clock(seconds), told.join("; "));
}

/** The last minute of a rank: how busy it was as an area, and its memory as a line. */
export class Strip {
  constructor() {
    this.root = drawing("svg", { class: "jd-strip", viewBox: `0 0 ${STRIP.width} ${STRIP.height}`, preserveAspectRatio: "none", role: "img" });
    this.title = this.root.appendChild(drawing("title", {}));
    this.busy = this.root.appendChild(drawing("path", { class: "jd-busy" }));
    this.memory = this.root.appendChild(drawing("path", { class: "jd-memory", "vector-effect": "non-scaling-stroke" }));
  }

  paint([busy, memory], usage) {
    const shown = busy.length > 1;
    this.root.toggleAttribute("data-empty", !shown);
    if (!shown || this.painted === busy + memory) return;
    this.painted = busy + memory;
    const [line, from] = [points(busy), STRIP.width - busy.length + 1];
    this.busy.setAttribute("d", `M${from} ${STRIP.height}L${line}L${STRIP.width} ${STRIP.height}Z`);
    this.memory.setAttribute("d", `M${points(memory)}`);
    const text = t("The last %1 s, how busy (area) and memory (line); now %2", busy.length, usage);
    set(this.title, text);
    this.root.setAttribute("aria-label", text);
  }
}

function points(digits) {
  return [...digits].map((digit, index) => `${STRIP.width - digits.length + 1 + index} ${(STRIP.height - 1 - (parseInt(digit, 36) / TOP) * (STRIP.height - 2)).toFixed(1)}`).join("L");
}

/** Where the time of each rank's training goes: a bar for each, and one legend. */
export class Shares {
  constructor(root) {
    this.root = root;
    set(root.appendChild(element("div", "jd-caption")), t("Where the time of the training goes"));
    this.bars = root.appendChild(element("div", "jd-share-bars"));
    this.legend = root.appendChild(element("div", "jd-legend"));
  }

  paint(shares) {
    this.root.hidden = !shares;
    if (!shares) return;
    const names = Object.keys(shares.colors);
    fill(this.bars, shares.ranks, newBarOf, (node, [rank, parts]) => {
      set(node.firstChild, t("rank %1", rank));
      const told = names.map((name, index) => [name, parts[index]]).filter(([, part]) => part >= 5);
      node.lastChild.setAttribute("aria-label", t("Time of rank %1: %2", rank, told.map(([name, part]) => `${t(name)} ${Math.round(part / 10)} %`).join(", ")));
      fill(node.lastChild, names, () => element("span"), (part, name) => {
        const share = parts[names.indexOf(name)];
        part.style.flexGrow = String(share);
        part.style.background = shares.colors[name];
        part.title = `${t(name)} ${(share / 10).toFixed(1)} %`;
      });
    });
    fill(this.legend, names, newKey, (node, name) => paintKey(node, shares.colors[name], t(name)));
  }
}

function newBarOf() {
  const node = element("div", "jd-share");
  node.append(element("span", "jd-share-rank"), element("span", "jd-share-bar"));
  node.lastChild.setAttribute("role", "img");
  return node;
}

function newKey() {
  const node = element("span", "jd-key");
  node.append(element("span", "jd-square"), element("span"));
  return node;
}

function paintKey(node, color, text) {
  node.firstChild.style.background = color;
  set(node.lastChild, text);
}

/** How far each rank was behind over the run: a row for each rank, time from left to right. */
export class Course {
  constructor(root) {
    this.root = root;
    set(root.appendChild(element("div", "jd-caption")), t("Steps behind the leading rank, over the run"));
    this.box = root.appendChild(element("div", "jd-course"));
    this.numbers = this.box.appendChild(element("div", "jd-course-ranks"));
    this.numbers.setAttribute("aria-hidden", "true");
    this.svg = this.box.appendChild(drawing("svg", { role: "img", preserveAspectRatio: "none" }));
    this.legend = root.appendChild(element("div", "jd-legend"));
  }

  paint(course) {
    this.root.hidden = !course;
    if (!course || this.painted === course) return;
    this.painted = course;
    const { rows, colors, seconds } = course;
    const [columns, small] = [rows[0][1].length, rows.length > 16];
    this.box.classList.toggle("jd-small", small);
    const height = small ? 5 : 14;
    this.svg.setAttribute("viewBox", `0 0 ${columns} ${rows.length * height}`);
    this.svg.style.height = `${rows.length * height}px`;
    this.svg.setAttribute("aria-label", courseText(course));
    this.svg.replaceChildren(...rows.flatMap(([rank, row], index) => rectangles(rank, row, index * height, height - 1, colors)));
    fill(this.numbers, rows, () => element("div"), (node, [rank]) => set(node, small && rank % 8 ? "" : t("rank %1", rank)));
    const levels = [...new Set(rows.flatMap(([, row]) => [...row]))].filter((level) => level !== NONE).sort();
    fill(this.legend, [...levels, ""], newKey, (node, level) => paintKey(node, level ? colors[level] : "transparent", level ? stepsOf(Number(level)) : t("steps behind, over %1", clock(seconds))));
  }
}

function rectangles(rank, row, y, height, colors) {
  let x = 0;
  return spansOf(row).flatMap(([level, width]) => {
    const from = x;
    x += width;
    if (level === NONE) return [];
    const node = drawing("rect", { x: from, y, width, height, fill: colors[level] });
    node.appendChild(drawing("title", {})).textContent = t("rank %1: %2 steps behind", rank, stepsOf(Number(level)));
    return [node];
  });
}
