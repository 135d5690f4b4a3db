// One rank in the page: a line, or a tile among many.

import { element, fill, set } from "./dom.js";
import { Output } from "./output.js";
import { t } from "./say.js";
import { GLYPHS, firstMetrics, stateName } from "./state.js";
import { Strip } from "./strips.js";

/** One rank: a line, or a tile among many. */
export class Row {
  constructor(rank) {
    this.rank = rank;
    this.root = element("li", "jd-rank");
    this.button = this.root.appendChild(element("button", "jd-no"));
    this.button.type = "button";
    this.button.setAttribute("aria-expanded", "false");
    const part = (name) => this.root.appendChild(element("span", `jd-${name}`));
    this.state = part("state");
    this.usage = part("usage");
    this.strip = new Strip();
    this.root.append(this.strip.root);
    this.outer = part("outer");
    this.bars = part("bars");
    this.metrics = part("metrics");
    this.last = part("last");
    this.root.addEventListener("click", (event) => {
      if (!event.target.closest(".jd-box") && !String(getSelection())) this.toggle();
    });
  }

  toggle() {
    this.open = !this.open;
    this.root.classList.toggle("jd-open", this.open);
    this.button.setAttribute("aria-expanded", String(this.open));
    if (this.open && !this.output) this.output = new Output(t("Output of rank %1", this.rank), this.rank);
    if (this.open) this.root.append(this.output.root);
    else this.output.root.remove();
    this.paint(...this.painted);
  }

  paint(said, lines, unfinished, state) {
    this.painted = [said, lines, unfinished, state];
    this.root.dataset.state = said.state;
    this.root.classList.toggle("jd-late", Boolean(said.behind));
    set(this.button, String(said.rank));
    this.button.setAttribute("aria-label", t("Rank %1, %2: show its output", said.rank, stateName(said.state)));
    fill(this.state, [GLYPHS[said.state], said.behind || stateName(said.state)], () => element("span"), set);
    this.state.firstChild?.setAttribute("aria-hidden", "true");
    fill(this.usage, said.memory ? [said.device, said.memory, said.busy] : [said.device], () => element("span"), set);
    this.usage.title = said.usage;
    this.strip.paint(said.strips, said.usage);
    set(this.outer, said.outer.join(" · "));
    fill(this.bars, said.bars, newBar, paintBar);
    fill(this.metrics, firstMetrics(said, this.open ? Infinity : 4), newMetric, paintMetric);
    this.metrics.title = firstMetrics(said, Infinity).map((metric) => metric.join(" ").trim()).join(", ");
    set(this.last, said.trouble.split("\n")[0] || said.last);
    this.last.title = said.trouble || said.last;
    if (this.open) this.output.paint(lines, unfinished, state);
  }
}

function newBar() {
  const node = element("span", "jd-bar");
  const track = node.appendChild(element("span", "jd-track"));
  track.setAttribute("role", "progressbar");
  track.append(element("span", "jd-filled"), element("span", "jd-hair"));
  node.append(element("span", "jd-steps"), element("span", "jd-rate"), element("span", "jd-percent"));
  return node;
}

function paintBar(node, bar) {
  const [track, steps, rate, percent] = node.children;
  track.hidden = bar.fraction === null;
  track.firstChild.style.transform = `scaleX(${(bar.fraction ?? 0).toFixed(3)})`;
  track.lastChild.hidden = bar.hair === null;
  track.lastChild.style.transform = `scaleX(${(bar.hair ?? 0).toFixed(3)})`;
  track.setAttribute("aria-label", bar.label || t("progress"));
  track.setAttribute("aria-valuenow", Math.round(100 * (bar.fraction ?? 0)));
  track.setAttribute("aria-valuetext", `${bar.steps} ${bar.left}`.trim());
  set(steps, bar.label ? `${bar.label} ${bar.steps}` : bar.steps);
  steps.style.minWidth = bar.width ? `${bar.width}ch` : "";
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
