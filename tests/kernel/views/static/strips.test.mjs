// The texts and spans of strips over time.

import assert from "node:assert/strict";
import test from "node:test";

const { courseText, spansOf, stepsOf } = await import("../../../../jupyter_distrib/kernel/views/static/strips.js");

test("equal levels beside one another are one span", () => {
  assert.deepEqual(spansOf("00.12"), [["0", 2], [".", 1], ["1", 1], ["2", 1]]);
});

test("a level stands for steps", () => {
  assert.deepEqual([0, 1, 2, 3, 9].map(stepsOf), ["0", "1", "2-3", "4-7", "256 and more"]);
});

test("a course is told by the ranks that were behind most", () => {
  const rows = [[0, "0001"], [1, "0024"], [2, "..35"]];
  assert.equal(courseText({ seconds: 75, rows }), "Steps behind the leading rank over 1:15: rank 2 up to 16-31; rank 1 up to 8-15");
});
