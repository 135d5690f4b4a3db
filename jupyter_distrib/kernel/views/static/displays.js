// What ranks display: text, an image that carries its data, or HTML in a frame in which nothing can run.

import { element, set } from "./dom.js";
import { t, tn } from "./say.js";

const TEXTS = ["text/plain", "text/markdown", "text/latex"];
const NO_TEXT = /^<IPython\.core\.display\.\w+ object>$/; // of IPython's own display objects
const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/** What one rank displayed. */
export class Card {
  constructor(rank) {
    this.root = element("figure", "jd-card");
    set(this.root.appendChild(element("figcaption")), t("rank %1", rank));
    this.rank = rank;
    this.shown = new Map();
  }

  paint({ displays, skipped_displays: skipped }) {
    const wanted = new Set(displays);
    for (const [display, node] of this.shown) {
      if (wanted.has(display)) continue;
      node.remove();
      this.shown.delete(display);
    }
    displays.forEach((display, index) => {
      if (!this.shown.has(display)) this.shown.set(display, displayed(display, this.rank));
      const [node, place] = [this.shown.get(display), this.root.children[index + 1]];
      if (place !== node) this.root.insertBefore(node, place ?? null);
    });
    this.root.title = skipped ? tn("%1 earlier display is not kept", "%1 earlier displays are not kept", skipped) : "";
  }
}

/** The richest representation in which nothing can run. */
function displayed({ data }, rank) {
  const kind = IMAGES.find((each) => each in data);
  if (kind && /^[A-Za-z0-9+/=\s]*$/.test(data[kind])) return image(`data:${kind};base64,${data[kind]}`, rank);
  if (data["image/svg+xml"]) return image(`data:image/svg+xml;charset=utf-8,${encodeURIComponent(data["image/svg+xml"])}`, rank);
  if (data["text/html"]) return frame(data["text/html"], rank);
  const texts = TEXTS.filter((each) => each in data).map((each) => data[each]);
  const text = texts.find((each) => !NO_TEXT.test(each)) ?? texts[0] ?? `(${Object.keys(data).join(", ")})`;
  const node = element("pre");
  // eslint-disable-next-line no-control-regex
  node.textContent = text.replace(/\x1b(\[[0-9;:?<=>!]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)/g, "");
  return node;
}

function image(source, rank) {
  const node = element("img");
  node.alt = t("Picture from rank %1", rank);
  node.src = source; // an SVG in an <img> runs no script and loads nothing
  return node;
}

/** Whether a page with text of this colour is `light` or `dark`, whatever the operating system prefers. */
export function scheme(color) {
  const [red = 0, green = 0, blue = 0] = (color.replace(/^color\(\S+/, "").match(/[\d.]+/g) ?? []).map(Number);
  const most = color.startsWith("color(") ? 1 : 255;
  return 0.299 * red + 0.587 * green + 0.114 * blue > most / 2 ? "dark" : "light";
}

/** A frame without the right to run scripts, submit forms or leave; its policy forbids loading anything, too. */
function frame(html, rank) {
  const node = element("iframe", "jd-frame");
  node.setAttribute("sandbox", "allow-same-origin"); // so that its height can be measured from here
  node.title = t("HTML from rank %1", rank);
  const policy = "default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline'";
  node.addEventListener("load", () => {
    const { body, documentElement } = node.contentDocument;
    const style = getComputedStyle(node.parentElement);
    node.style.colorScheme = documentElement.style.colorScheme = scheme(style.color); // both, or the frame is not transparent
    body.style.cssText = `margin: 0; width: max-content; max-width: 640px; color: ${style.color}; font: ${style.fontSize}/1.5 ${style.fontFamily}`;
    node.style.width = `${body.scrollWidth + 2}px`;
    node.style.height = `${Math.min(600, body.scrollHeight + 4)}px`;
  });
  node.srcdoc = `<!DOCTYPE html><meta http-equiv="Content-Security-Policy" content="${policy}"><style>table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #8884}</style><body>${html}`;
  return node;
}
