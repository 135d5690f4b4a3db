// What ranks display cannot run anything in the page: in a document that only remembers what is done to it.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Card } from "../../../../jupyter_distrib/kernel/views/static/displays.js";
import { setLinked, setParts } from "../../../../jupyter_distrib/kernel/views/static/dom.js";

const ATTACK = "<img src=x onerror=alert(1)>";

class Node {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, style: {}, textContent: "" });
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  appendChild(node) {
    this.children.push(node);
    return node;
  }
  insertBefore(node) {
    this.children.push(node);
  }
  replaceChildren(...nodes) {
    this.children = nodes;
  }
  addEventListener() {}
  set innerHTML(text) {
    assert.fail(`text became markup: ${text}`);
  }
}
globalThis.document = { createElement: (tag) => new Node(tag) };

/** The node of one display. */
function shown(data) {
  const card = new Card(0);
  card.paint({ displays: [{ data }], skipped_displays: 0 });
  return card.root.children[1];
}

test("HTML is in a frame that runs no scripts, sends no forms and loads nothing", () => {
  const frame = shown({ "text/html": ATTACK });
  assert.equal(frame.tag, "iframe");
  assert.equal(frame.attributes.sandbox, "allow-same-origin");
  const head = frame.srcdoc.slice(0, frame.srcdoc.indexOf(ATTACK));
  const policy = head.match(/http-equiv="Content-Security-Policy" content="([^"]*)"/)[1];
  assert.deepEqual(policy.split("; ").toSorted(), ["default-src 'none'", "font-src data:", "img-src data:", "style-src 'unsafe-inline'"]);
});

test("a drawing is an image, in which no script runs", () => {
  const image = shown({ "image/svg+xml": `<svg onload="alert(1)"/>`, "text/html": "x" });
  assert.equal(image.tag, "img");
  assert.ok(image.src.startsWith("data:image/svg+xml;charset=utf-8,%3Csvg%20onload"));
});

test("an image that is no base64 is not used", () => {
  assert.equal(shown({ "image/png": `AA" onerror="alert(1)`, "text/plain": "text" }).tag, "pre");
  assert.equal(shown({ "image/png": "AA==\n" }).src, "data:image/png;base64,AA==\n");
});

test("scripts, widgets and text in place of them are text", () => {
  for (const data of [{ "text/plain": ATTACK }, { "text/latex": ATTACK }, { "application/javascript": "alert(1)" }]) {
    assert.equal(shown(data).tag, "pre");
  }
  assert.equal(shown({ "text/plain": ATTACK }).textContent, ATTACK);
  assert.equal(shown({ "application/javascript": "alert(1)" }).textContent, "(application/javascript)");
});

test("lines and notes are text, and an address is opened without the page", () => {
  const node = new Node("p");
  setParts(node, [{ text: ATTACK, css: "" }, { text: ATTACK, css: "color:red" }]);
  assert.deepEqual([node.children[0], node.children[1].textContent], [ATTACK, ATTACK]);
  setLinked(node, [ATTACK, "https://a.example", ""]);
  const [text, link] = node.children;
  assert.deepEqual([text, link.href, link.rel, link.target], [ATTACK, "https://a.example", "noopener noreferrer", "_blank"]);
});
