// What each rank did over a run: a row for each rank, time from left to right, and who waited for whom. What is said
// and drawn is pure; `Heat` puts it into the page.

import { drawing, element, fill, set } from "./dom.js";
import { t, tn } from "./say.js";
import { clock, rankList, size } from "./words.js";

const NONE = ".";
const WAITS = "waits";
const MOST_WAITED_FOR = 16;
const TALL = 14; // of a row, in pixels, up to so many rows; else it is small
const SMALL = 5;
const TALL_UNTIL = 16;

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

/** The tables that there are, the first one first, each with its name. */
export function kindsOf({ rows, waits, gpus }) {
  const names = {
    behind: t("Steps behind the leading rank"),
    busy: gpus ? t("GPU") : t("CPU"),
    memory: gpus ? t("GPU memory") : t("Memory"),
    waiting: t("Communication"),
    [WAITS]: t("Who waits for whom"),
  };
  return Object.entries(names).filter(([kind]) => (kind === WAITS ? waits.length : rows[kind]));
}

/** What is drawn of a kind: a rank and its levels in each row, and what a level stands for. */
export function tableOf(over, kind) {
  if (kind === WAITS) return waitsTable(over);
  const most = over.most[kind] ?? 1;
  const write = (value) => (kind === "memory" ? size(value) : kind === "waiting" ? `${Math.round(100 * value)} %` : `${Math.round(value)} %`);
  const text = kind === "behind" ? stepsOf : (level) => `${write((level * most) / 10)} - ${write(((level + 1) * most) / 10)}`;
  return { rows: over.ranks.map((rank, place) => [rank, over.rows[kind][place]]), text, columns: null };
}

/** A row for each rank that others waited for, most first; a column for each rank that waited. */
function waitsTable({ waits, ranks }) {
  const columns = [...ranks].sort((a, b) => a - b);
  const sums = new Map();
  for (const [, other, seconds] of waits) sums.set(other, (sums.get(other) ?? 0) + seconds);
  const others = [...sums].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, MOST_WAITED_FOR).map(([other]) => other);
  const most = Math.max(...waits.map(([, , seconds]) => seconds)) || 1;
  const of = new Map(waits.map(([rank, other, seconds]) => [`${rank} ${other}`, seconds]));
  const level = (seconds) => (seconds === undefined ? NONE : String(Math.min(9, Math.floor((10 * seconds) / most))));
  const text = (each) => t("%1 - %2 s", ((each * most) / 10).toFixed(1), (((each + 1) * most) / 10).toFixed(1));
  return { rows: others.map((other) => [other, columns.map((rank) => level(of.get(`${rank} ${other}`))).join("")]), text, columns };
}

/** For whom others waited, most first: `rank 5: 63 ranks waited, 41 s each`. */
export function waitsTexts({ waits }) {
  const waiting = new Map();
  for (const [, other, seconds] of waits) waiting.set(other, [...(waiting.get(other) ?? []), seconds]);
  const sums = [...waiting].map(([other, seconds]) => ({ other, count: seconds.length, sum: seconds.reduce((a, b) => a + b, 0) }));
  return sums.sort((a, b) => b.sum - a.sum || a.other - b.other).slice(0, 3).map(({ other, count, sum }) => tn("rank %2: %1 rank waited %3 s", "rank %2: %1 ranks waited, %3 s each", count, other, (sum / count).toFixed(1)));
}

/** What the picture of steps behind says to those who cannot see it. */
export function courseText({ seconds, rows }) {
  const worst = rows.map(([rank, row]) => [rank, Math.max(0, ...[...row].filter((level) => level !== NONE).map(Number))]);
  const late = worst.filter(([, level]) => level > 1).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const told = late.slice(0, 8).map(([rank, level]) => t("rank %1 up to %2", rank, stepsOf(level)));
  return t("Steps behind the leading rank over %1: %2", clock(seconds), told.join("; ") || t("no rank is behind"));
}

/** The picture of a table in words. */
export function heatText(over, kind, name) {
  const { rows, text } = tableOf(over, kind);
  if (kind === "behind") return courseText({ seconds: over.seconds, rows });
  if (kind === WAITS) return `${name}: ${waitsTexts(over).join("; ")}`;
  const levels = rows.flatMap(([, row]) => [...row].filter((level) => level !== NONE).map(Number));
  const range = levels.length ? t("from %1 to %2", text(Math.min(...levels)), text(Math.max(...levels))) : "";
  return t("%1 of %2 over %3 %4", name, rankList(over.ranks), clock(over.seconds), range).trim();
}

/** The path of each level in a table whose rows have this height. */
export function pathsOf(rows, height) {
  const paths = new Map();
  rows.forEach(([, row], place) => {
    let x = 0;
    for (const [level, width] of spansOf(row)) {
      if (level !== NONE) paths.set(level, `${paths.get(level) ?? ""}M${x} ${place * height}h${width}v${height - 1}h-${width}z`);
      x += width;
    }
  });
  return paths;
}

/** The tables of a run in the page, one at a time. */
export class Heat {
  constructor(root) {
    this.root = root;
    this.kinds = root.appendChild(element("div", "jd-chart-tools"));
    this.kinds.setAttribute("role", "toolbar");
    this.kinds.setAttribute("aria-label", t("Ranks over time"));
    this.caption = root.appendChild(element("div", "jd-caption"));
    this.box = root.appendChild(element("div", "jd-course"));
    this.numbers = this.box.appendChild(element("div", "jd-course-ranks"));
    this.numbers.setAttribute("aria-hidden", "true");
    this.svg = this.box.appendChild(drawing("svg", { role: "img", preserveAspectRatio: "none" }));
    this.ticks = root.appendChild(element("div", "jd-ticks jd-course-ticks"));
    this.ticks.setAttribute("aria-hidden", "true");
    this.foot = root.appendChild(element("div", "jd-legend"));
    this.legend = root.appendChild(element("div", "jd-legend"));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.tell(""));
  }

  choose(kind) {
    this.chosen = kind;
    this.painted = null;
    this.paint(this.over);
  }

  paint(over) {
    this.root.hidden = !over;
    if (!over || this.painted === over) return;
    this.painted = this.over = over;
    const kinds = kindsOf(over);
    const [kind, name] = (this.kind = kinds.find(([each]) => each === this.chosen) ?? kinds[0]);
    fill(this.kinds, kinds, () => this.newKind(), (node, [each, text]) => {
      set(node, text);
      node.value = each;
      node.setAttribute("aria-pressed", String(each === kind));
    });
    const { rows, text, columns } = (this.table = tableOf(over, kind));
    const small = rows.length > TALL_UNTIL;
    const height = small ? SMALL : TALL;
    this.box.classList.toggle("jd-small", small);
    this.svg.setAttribute("viewBox", `0 0 ${rows[0][1].length} ${rows.length * height}`);
    this.svg.style.height = `${rows.length * height}px`;
    this.svg.setAttribute("aria-label", heatText(over, kind, name));
    const paint = (level) => (kind === "behind" ? { fill: over.colors[level] } : { fill: "var(--jd-first)", "fill-opacity": String(0.08 + 0.1 * Number(level)) });
    this.svg.replaceChildren(...[...pathsOf(rows, height)].map(([level, d]) => drawing("path", { d, "data-level": level, ...paint(level) })));
    set(this.caption, kind === WAITS ? t("A row for each rank that others waited for, a column for each rank that waited") : t("%1, a row for each rank, over the run", name));
    fill(this.numbers, rows, () => element("div"), (node, [rank], place = [...this.numbers.children].indexOf(node)) => set(node, small && place % 8 ? "" : t("rank %1", rank)));
    fill(this.ticks, columns ? [t("rank %1", columns[0]), t("rank %1", columns[columns.length - 1])] : [0, over.seconds / 2, over.seconds].map(clock), () => element("span"), set);
    const levels = [...new Set(rows.flatMap(([, row]) => [...row]))].filter((level) => level !== NONE).sort();
    fill(this.legend, [...levels, ""], newKey, (node, level) => paintKey(node, level ? paint(level) : null, level ? text(Number(level)) : kind === "behind" ? t("steps behind, over %1", clock(over.seconds)) : ""));
    this.tell("");
  }

  newKind() {
    const node = /** @type {HTMLButtonElement} */ (element("button", "jd-tool"));
    node.type = "button";
    node.addEventListener("click", () => this.choose(node.value));
    return node;
  }

  /** Say what is under the pointer. */
  point({ offsetX, offsetY }) {
    const { rows, text, columns } = this.table;
    const [rank, row] = rows[Math.min(rows.length - 1, Math.max(0, Math.floor((offsetY / this.svg.clientHeight) * rows.length)))];
    const place = Math.min(row.length - 1, Math.max(0, Math.floor((offsetX / this.svg.clientWidth) * row.length)));
    const value = row[place] === NONE ? "-" : text(Number(row[place]));
    const at = columns ? t("rank %1 waited for rank %2", columns[place], rank) : t("rank %1 at %2", rank, clock((this.over.seconds * (place + 0.5)) / row.length));
    this.tell(`${at}: ${value}`);
  }

  /** What is under the pointer, or else for whom others wait. */
  tell(text) {
    const told = text ? [text] : this.kind[0] === WAITS ? waitsTexts(this.over) : [];
    fill(this.foot, told.length ? told : [" "], () => element("span"), set);
  }
}

/** An entry of a legend. */
export function newKey() {
  const node = element("span", "jd-key");
  node.append(element("span", "jd-square"), element("span"));
  return node;
}

export function paintKey(node, paint, text) {
  node.firstChild.style.background = paint?.fill ?? "transparent";
  node.firstChild.style.opacity = paint?.["fill-opacity"] ?? "1";
  set(node.lastChild, text);
}
