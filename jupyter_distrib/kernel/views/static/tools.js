// The tools of a box of output: search, errors only, wrap, follow, copy, the whole log.

import { copyText, element, set } from "./dom.js";
import { t, tn } from "./say.js";

const OWN_KEYS = "data-lm-suppress-shortcuts"; // keys that are pressed here are no commands of JupyterLab's

/** The bar above a box; `changed` is called when something else is wanted, `copied` gives what Copy takes. */
export class Tools {
  /** `open` shows the whole log; without it there is no such button. */
  constructor(open = null) {
    this.filter = { search: "", errors: false };
    this.following = true;
    this.changed = () => {};
    this.copied = () => "";
    this.root = element("div", "jd-tools");
    this.root.setAttribute("role", "toolbar");
    this.root.setAttribute("aria-label", t("Output"));
    this.search = this.root.appendChild(element("input", "jd-search"));
    this.search.type = "search";
    this.search.setAttribute(OWN_KEYS, "true");
    this.search.placeholder = t("Search");
    this.search.setAttribute("aria-label", t("Search the output"));
    this.search.addEventListener("input", () => this.change({ search: this.search.value }));
    this.count = this.root.appendChild(element("span", "jd-found"));
    this.count.setAttribute("aria-live", "polite");
    this.errors = this.toggle(t("Errors only"), t("Show only lines that tell of trouble"), () => this.change({ errors: !this.filter.errors }));
    this.wrap = this.toggle(t("Wrap"), t("Break long lines"), () => this.change({}));
    this.follow = this.toggle(t("Follow"), t("Keep the newest line in sight; while this is off, nothing moves"), () => this.setFollowing(!this.following));
    this.press(this.wrap, true);
    this.press(this.follow, true);
    this.copy = this.button(t("Copy"), t("Copy all lines that match"), () => void this.copyAll());
    if (open) this.button(t("Whole log"), t("Open all that the ranks wrote in a tab"), open);
  }

  button(name, title, act) {
    const node = this.root.appendChild(element("button", "jd-act"));
    node.type = "button";
    node.title = title;
    node.setAttribute(OWN_KEYS, "true");
    set(node, name);
    node.addEventListener("click", act);
    return node;
  }

  toggle(name, title, act) {
    const node = this.button(name, title, () => {
      this.press(node, node.getAttribute("aria-pressed") !== "true");
      act();
    });
    node.setAttribute("aria-pressed", "false");
    return node;
  }

  press(node, pressed) {
    node.setAttribute("aria-pressed", String(pressed));
  }

  get wraps() {
    return this.wrap.getAttribute("aria-pressed") === "true";
  }

  get filtering() {
    return Boolean(this.filter.search || this.filter.errors);
  }

  change(more) {
    this.filter = { ...this.filter, ...more };
    this.changed();
  }

  setFollowing(following) {
    if (this.following === following) return;
    this.following = following;
    this.press(this.follow, following);
    this.changed();
  }

  /** Say how many lines match, and how many have come since the box stands still. */
  tell(found, waiting) {
    set(this.count, this.filtering ? tn("%1 line", "%1 lines", found) : "");
    set(this.follow, waiting ? t("Follow (%1 new)", waiting) : t("Follow"));
  }

  async copyAll() {
    const done = await copyText(this.copied());
    set(this.copy, done ? t("Copied") : t("Not copied"));
    setTimeout(() => set(this.copy, t("Copy")), 1500);
  }
}
