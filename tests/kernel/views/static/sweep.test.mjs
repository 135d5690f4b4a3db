// The lines of a sweep's parallel coordinates, and its table as text.

import assert from "node:assert/strict";
import test from "node:test";

const { asText, parallelOf, placesOn } = await import("../../../../jupyter_distrib/kernel/views/static/sweep.js");
const row = (lr, kind, loss, state = "done") => ({ swept: { lr, kind }, numbers: loss === null ? {} : { loss }, state });

test("numbers are placed by size, other values in the order in which they come", () => {
  assert.deepEqual(placesOn(["1", "3", "2"]), [0, 1, 0.5]);
  assert.deepEqual(placesOn(["'adam'", "'sgd'", "'adam'"]), [0, 1, 0]);
  assert.deepEqual(placesOn([null, 4, 4]), [null, 0.5, 0.5]);
  assert.deepEqual(placesOn(["0.001", "0.1", "0.01"]).map((place) => place.toFixed(3)), ["0.000", "1.000", "0.500"]);
  assert.deepEqual(placesOn(["0", "100", "50"]), [0, 1, 0.5]);
});

test("parallel coordinates are read back: a line for each run that has the metric", () => {
  const { axes, paths } = parallelOf([row("0.1", "a", 1), row("0.3", "b", 3), row("0.2", "a", null)], ["lr", "kind"], "loss");
  assert.deepEqual(paths, ["M8.0 142.0L300.0 142.0L592.0 142.0", "M8.0 8.0L300.0 8.0L592.0 8.0", ""]);
  assert.deepEqual(axes.map(({ name, low, high }) => [name, low, high]), [["lr", "0.1", "0.3"], ["kind", "a", "b"], ["loss", "1", "3"]]);
});

test("a table is copied with a line for each configuration, whatever is in it", () => {
  const text = asText({ rows: [row("0.1", "a\tb\nc", 1), row("0.2", "d", null, "failed")], names: ["lr", "kind"], metrics: ["loss"] });
  assert.equal(text, "lr\tkind\tloss\tstate\n0.1\ta b c\t1\tdone\n0.2\td\t\tfailed");
});

test("a run that has not reported a metric has no value for it, whatever it is called", () => {
  const rows = [{ swept: { lr: 1 }, numbers: { constructor: 2 }, state: "done" }, { swept: { lr: 2 }, numbers: {}, state: "running" }];
  assert.equal(asText({ rows, names: ["lr"], metrics: ["constructor"] }), "lr\tconstructor\tstate\n1\t2\tdone\n2\t\trunning");
  assert.deepEqual(parallelOf(rows, ["lr"], "constructor").paths.map(Boolean), [true, false]);
});
