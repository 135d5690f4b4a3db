// What ranks do, as strips: the last minute of each, and where the time of its training goes.

import { drawing, element, fill, set } from "./dom.js";
import { newKey, paintKey } from "./heat.js";
import { t } from "./say.js";

const SECONDS = 60;
const TOP = 35; // the highest digit of a strip
const STRIP = { width: SECONDS, height: 16 };

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
    fill(this.legend, names, newKey, (node, name) => paintKey(node, { fill: shares.colors[name] }, t(name)));
  }
}

function newBarOf() {
  const node = element("div", "jd-share");
  node.append(element("span", "jd-share-rank"), element("span", "jd-share-bar"));
  node.lastChild.setAttribute("role", "img");
  return node;
}
