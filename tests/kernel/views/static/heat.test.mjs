// The texts, rows and paths of tables of rank and time.

import assert from "node:assert/strict";
import test from "node:test";

const { courseText, heatText, kindsOf, pathsOf, spansOf, stepsOf, tableOf, waitsTexts } = await import("../../../../jupyter_distrib/kernel/views/static/heat.js");

const over = {
  seconds: 40, ranks: [2, 0, 1], gpus: true, colors: [],
  rows: { behind: ["0135", "0000", "00.."], busy: ["9999", "4444", "40.."], memory: ["5555", "2222", "22.."], waiting: ["0000", "6666", "66.."] },
  most: { busy: 100, memory: 2e10, waiting: 1 },
  waits: [[0, 2, 24], [1, 2, 12], [2, 0, 1]],
};

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

test("only the tables that are there can be chosen", () => {
  assert.deepEqual(kindsOf(over).map(([kind]) => kind), ["behind", "busy", "memory", "waiting", "waits"]);
  assert.deepEqual(kindsOf({ rows: { busy: [] }, waits: [], gpus: false }), [["busy", "CPU"]]);
});

test("a table has the straggler's row first, and says what its levels are", () => {
  const { rows, text } = tableOf(over, "memory");
  assert.deepEqual(rows, [[2, "5555"], [0, "2222"], [1, "22.."]]);
  assert.equal(text(5), "10.0 GB - 12.0 GB");
  assert.equal(tableOf(over, "busy").text(9), "90 % - 100 %");
  assert.equal(heatText(over, "busy", "GPU"), "GPU of ranks 0-2 over 0:40 from 0 % - 10 % to 90 % - 100 %");
});

test("a path is read back to the levels that it draws", () => {
  const paths = pathsOf([[7, "0011"], [3, ".1.0"]], 5);
  assert.deepEqual([...paths], [["0", "M0 0h2v4h-2zM3 5h1v4h-1z"], ["1", "M2 0h2v4h-2zM1 5h1v4h-1z"]]);
});

test("who waits for whom is a row for each that others waited for", () => {
  const { rows, columns, text } = tableOf(over, "waits");
  assert.deepEqual(columns, [0, 1, 2]);
  assert.deepEqual(rows, [[2, "95."], [0, "..0"]]);
  assert.equal(text(9), "21.6 - 24.0 s");
  assert.deepEqual(waitsTexts(over), ["rank 2: 2 ranks waited, 18.0 s each", "rank 0: 1 rank waited 1.0 s"]);
});
