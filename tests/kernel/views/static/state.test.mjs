// The view's pure functions, with the state that Python is tested with. Run with `node --test tests/static/`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { BOX, chartGroups, chartNames, chartOf, chartText, crossOf, isNoisy, oddsOfEach, smoothed, ticks, valuesAt } from "../../../../jupyter_distrib/kernel/views/static/chart.js";
import { means } from "../../../../jupyter_distrib/kernel/views/static/mean.js";
import { scheme } from "../../../../jupyter_distrib/kernel/views/static/displays.js";
import { partsOf } from "../../../../jupyter_distrib/kernel/views/static/styles.js";
import { Logs, fold, interleave, matches, whose } from "../../../../jupyter_distrib/kernel/views/static/lines.js";
import { addressed, assemble, behind, behindText, failures, firstMetrics, notes, order, places, row, runLeft, secondsLeft, stacks, steadyLoops, stopping, summary, title } from "../../../../jupyter_distrib/kernel/views/static/state.js";
import { amount, clock, digits, direction, size, spans, steady } from "../../../../jupyter_distrib/kernel/views/static/words.js";

const golden = JSON.parse(readFileSync(new URL("../../record/golden_run_state.json", import.meta.url)));
const failing = JSON.parse(readFileSync(new URL("../../record/golden_failures.json", import.meta.url)));
const state = () => ({ ...structuredClone(golden), pool: "local", stopping: "" });

const a_rank = (rank, more = {}) => ({ ...structuredClone(golden.ranks[1]), rank, state: "running", failure: null, exit: null, ...more });
const a_bar = (step, more = {}) => ({ label: "step", step, total: 100, rate: 10, unit: "it", detail: "", ...more });
const a_run = (...ranks) => ({ ...state(), stall: null, ranks });
const line = (rank, text, more = {}) => ({ rank, stream: "stdout", text, skipped: 0, ...more });

// ------------------------------------------------------------------------------------------------ pieces

const pieces = (count, chunks) => {
  const held = { head: { run: "r", numbers: [0] }, rank_0: { rank: 0, shown: { first: 0, count: 0 } } };
  for (const [chunk, entries] of chunks) held[`lines_${chunk % 24}`] = { chunk, entries };
  return (key) => held[key];
};
const numbers = (first, count) => Array.from({ length: count }, (_, index) => line(0, String(first + index)));

test("nothing is assembled before the first piece has come", () => {
  assert.equal(assemble(() => undefined), null);
});

test("pieces are put together", () => {
  const held = {
    head: { run: "r", numbers: [0, 5] },
    rank_0: { rank: 0, shown: { first: 0, count: 0 } },
    rank_5: { rank: 5, shown: { first: 101, count: 2 } },
    history_5: { step: [1], "=loss": [2] },
    display_5_1: { index: 101, data: { "text/plain": "b" } },
    display_5_2: { index: 2, data: { "text/plain": "left over from before" } },
  };
  const made = assemble((key) => held[key]);

  assert.deepEqual(made.ranks.map((rank) => rank.rank), [0, 5]);
  assert.deepEqual(made.ranks[1].displays.map((display) => display.index), [101]);
  assert.deepEqual(made.ranks[1].columns, { step: [1], "=loss": [2] });
});

test("each line is taken once, as chunks grow and follow", () => {
  const logs = new Logs();
  logs.take(pieces(0, [[0, numbers(0, 3)]]));
  logs.take(pieces(0, [[0, numbers(0, 50)], [1, numbers(50, 2)]]));
  logs.take(pieces(0, [[0, numbers(0, 50)], [1, numbers(50, 2)]]));

  assert.deepEqual(logs.all.map((each) => each.text), numbers(0, 52).map((each) => each.text));
});

test("an older state of a chunk takes nothing back", () => {
  const logs = new Logs();
  logs.take(pieces(0, [[0, numbers(0, 5)]]));
  logs.take(pieces(0, [[0, numbers(0, 3)]]));
  logs.take(pieces(0, [[0, numbers(0, 6)]]));

  assert.deepEqual(logs.all.map((each) => each.text), numbers(0, 6).map((each) => each.text));
});

test("what was overwritten in the ring before it could be read is a gap", () => {
  const logs = new Logs();
  logs.take(pieces(0, [[0, numbers(0, 50)]]));
  logs.take(pieces(0, [[30, numbers(1500, 2)]]));

  assert.deepEqual(logs.of(0).slice(-3).map((each) => each.skipped || each.text), [1450, "1500", "1501"]);
});

test("what is kept of the output does not grow without end", () => {
  const logs = new Logs();
  for (let chunk = 0; chunk < 400; chunk += 1) logs.take(pieces(0, [[chunk, numbers(50 * chunk, 50)]]));

  assert.ok(logs.all.length <= 2000 && logs.of(0).length >= 1000);
  assert.equal(logs.all.at(-1).text, "19999");
});

// ------------------------------------------------------------------------------------------------ words

test("numbers are short", () => {
  assert.deepEqual([45, 1.5, 12345, 629e6].map(amount), ["45", "1.5", "12.3k", "629M"]);
  assert.deepEqual([9.999, 9.99, 25, 103.4, 1234].map(steady), ["10.0", "9.99", "25.0", "103", "1.23k"]);
  assert.deepEqual([41, 725, 3723].map(clock), ["0:41", "12:05", "1:02:03"]);
  assert.deepEqual([0.123456, 1e-9, 1234567, 1.66e-4, "nan", 0].map((value) => digits(value)), ["0.1235", "1e-9", "1234567", "1.66e-4", "nan", "0"]);
  assert.deepEqual([500, 2147483648].map(size), ["500 bytes", "2.1 GB"]);
  assert.equal(spans([5, 0, 1, 2]), "0-2, 5");
});

test("the title says what runs where", () => {
  assert.equal(title(state()), "4 ranks · ddp · local · 4 × A100");
  assert.equal(title({ ...state(), world_size: 8 }), "ranks 0-3 of 8 · ddp · local · 4 × A100");
});

test("the scheme of a page is told by the colour of its text", () => {
  assert.deepEqual(["rgba(0, 0, 0, 0.87)", "rgb(20, 40, 60)", "color(srgb 0.1 0.2 0.1)", ""].map(scheme), Array(4).fill("light"));
  assert.deepEqual(["rgb(255, 255, 255)", "rgba(200, 210, 220, 0.9)", "color(srgb 0.9 0.9 0.8)"].map(scheme), Array(3).fill("dark"));
});

test("addresses in a note are parts of their own", () => {
  assert.deepEqual(addressed("see https://a.example/x?y=1&z=2."), ["see ", "https://a.example/x?y=1&z=2", "."]);
  assert.deepEqual(addressed("javascript:alert(1) http:// x"), ["javascript:alert(1) http:// x"]);
});

test("notes name their ranks, and each is told once", () => {
  const twice = { ...state(), remark: "", notes: [{ rank: 0, text: "x" }, { rank: 1, text: "x" }, { rank: null, text: "y" }] };
  assert.deepEqual(notes(twice), ["ranks 0-1: x", "y"]);
});

test("equal failures are one", () => {
  assert.deepEqual(failures(state()), ["rank 2: KeyError: 'lr' at Cell In[5], line 9", "rank 3 was killed by the system's out-of-memory killer"]);
  const failure = { type: "torch.cuda.OutOfMemoryError", message: "8 GB", traceback: "1f" };
  const all = a_run(...[0, 1, 2].map((rank) => a_rank(rank, { state: "failed", failure })));
  assert.deepEqual(failures(all), ["all 3 ranks: OutOfMemoryError: 8 GB"]);
});

test("only exactly equal tracebacks are one", () => {
  assert.deepEqual(failures(assemble((key) => failing[key])), [
    "ranks 0, 2: KeyError: 'lr' at Cell In[5], line 9, in train",
    "rank 1: KeyError: 'lr' at Cell In[5], line 9, in train (another traceback)",
    "rank 3 stopped because of rank 0",
  ]);
});

test("what only followed from a failure comes after it", () => {
  const failure = { type: "RuntimeError", message: "Connection closed by peer" };
  const ranks = [a_rank(0, { state: "failed", failure, consequence: true }), a_rank(1, { state: "failed", failure: { type: "ValueError", message: "" } }), a_rank(2, { state: "interrupted" })];
  const run = { ...a_run(...ranks), cause: 1 };
  assert.deepEqual(failures(run), ["rank 1: ValueError", "ranks 0, 2 stopped because of rank 1"]);
  assert.deepEqual(failures({ ...run, cause: null }), ["rank 1: ValueError", "rank 0 stopped because another rank was gone"]);
  assert.deepEqual(order(run).map((rank) => rank.rank), [1, 0, 2]);
});

test("a stall names first those who do not wait", () => {
  const at = (rank, where, waiting) => ({ rank, where, line: 14, waiting });
  const stall = { text: "", places: [at(0, "waits in all_reduce #2", true), at(1, "runs load()", false), at(2, "waits in all_reduce #2", true)] };
  assert.deepEqual(places(stall), [
    { text: "rank 1: runs load() (line 14)", waiting: false },
    { text: "ranks 0, 2: each waits in all_reduce #2 (line 14)", waiting: true },
  ]);
});

test("equal stacks are shown once, and none of a rank that has ended", () => {
  const at = (lines, more = {}) => ({ stack: { lines, trouble: "", seen_s: 41, ...more } });
  const run = a_run(a_rank(0, at(["a", "b"])), a_rank(1, at([], { trouble: "is stopped (SIGSTOP)" })), a_rank(2, at(["a", "b"])), a_rank(3, { ...at(["a"]), state: "done" }), a_rank(4, { stack: null }));
  assert.deepEqual(stacks(run), [
    { title: "ranks 0, 2 at 0:41", lines: ["a", "b"] },
    { title: "rank 1 at 0:41: is stopped (SIGSTOP)", lines: [] },
  ]);
});

test("the stages of a stop are told", () => {
  const run = a_run(a_rank(0, { state: "interrupted" }), a_rank(1));
  assert.equal(stopping(run, ""), "");
  assert.equal(stopping(run, "asked"), "asked to stop; rank 1 still running");
  run.stall = { text: "", places: [{ rank: 1, where: "waits in all_reduce #3", line: 4, waiting: true }] };
  assert.equal(stopping(run, "asked"), "asked to stop; rank 1 still running: rank 1 waits in all_reduce #3");
  assert.equal(stopping({ ...run, stopping: "asked" }, ""), stopping(run, "asked"));
  assert.equal(stopping(run, "killed"), "killing rank 1");
  run.ranks[1].state = "lost";
  assert.equal(stopping(run, "killed"), "stopped");
});

test("the sentence for screen readers tells states, trouble and the stall", () => {
  assert.match(summary(state(), ""), /1 done; 1 running; 1 failed; 1 lost; rank 2: KeyError: 'lr' at Cell In\[5\], line 9; .*rank 0 has left/);
});

// ------------------------------------------------------------------------------------------------ ranks

test("a rank that is behind is told in seconds of the pace of all", () => {
  const late = behind(a_run(a_rank(0, { progress: [a_bar(50)] }), a_rank(1, { progress: [a_bar(29)] }), a_rank(2, { progress: [a_bar(49)] })));
  assert.deepEqual([...late], [[1, { steps: 21, seconds: 2.1 }]]);
  assert.equal(behindText(late.get(1)), "2.1 s behind");
});

test("nested loops count together", () => {
  const at = (epoch, step) => [a_bar(epoch, { label: "epoch", total: 3 }), a_bar(step)];
  const late = behind(a_run(a_rank(0, { progress: at(1, 5) }), a_rank(1, { progress: at(0, 95) })));
  assert.deepEqual(late.get(1), { steps: 10, seconds: 1 });
});

test("a rank is still behind when the others have ended, if they were in the same loops", () => {
  const done = (rank, more) => a_rank(rank, { state: "done", progress: [a_bar(100, more)] });
  const run = a_run(done(0), done(1), a_rank(2, { progress: [a_bar(45)] }));
  assert.equal(behindText(behind(run).get(2)), "5.5 s behind");
  assert.deepEqual(order(run).map(({ rank }) => rank), [2, 0, 1]);
  assert.equal(behind(a_run(done(0, { total: 400 }), a_rank(1, { progress: [a_bar(45)] }))).size, 0, "another loop");
  const epochs = [{ ...a_bar(2), label: "epoch", total: 3 }];
  const nested = a_run(a_rank(0, { state: "done", progress: [{ ...a_bar(3), label: "epoch", total: 3, rate: null }] }), a_rank(1, { progress: [...epochs.map((bar) => ({ ...bar, step: 1, rate: 0.5 })), a_bar(5)] }));
  assert.equal(behindText(behind(nested).get(1)), "4.0 s behind");
});

test("a loop without a known pace counts in steps; one rank alone is not behind", () => {
  const bare = (step) => [a_bar(step, { rate: null, total: null })];
  assert.equal(behindText(behind(a_run(a_rank(0, { progress: bare(90) }), a_rank(1, { progress: bare(30) }))).get(1)), "60 steps behind");
  assert.equal(behind(a_run(a_rank(0, { progress: bare(90) }))).size, 0);
});

test("failed ranks come first, then those behind, then the others by number", () => {
  const run = a_run(a_rank(0, { progress: [a_bar(50)] }), a_rank(1, { progress: [a_bar(50)] }), a_rank(2, { progress: [a_bar(10)] }), a_rank(3, { state: "lost" }));
  assert.deepEqual(order(run).map((rank) => rank.rank), [3, 2, 0, 1]);
});

test("a row says what a rank does", () => {
  const said = row(golden.ranks[0], null);
  assert.equal(said.device, "GPU 0");
  assert.equal(said.usage, "GPU memory 6.4 GB of 85.9 GB, GPU 75 % busy, tensors 5.9 GB, reserved for them 6.2 GB");
  const contained = row({ ...golden.ranks[0], gpu_memory_of_all: true }, null);
  assert.match(contained.usage, /reserved for them 6.2 GB; the driver lists no processes here/);
  assert.deepEqual(said.bars[0], { label: "train", steps: "25/100", width: 13, fraction: 0.25, percent: "25 %", rate: "", left: "", detail: "loss=0.31", hair: null });
  assert.deepEqual(said.metrics[0], ["loss", "0.6667"]);
  const moving = row(a_rank(1, { progress: [a_bar(3, { total: 4 }), a_bar(25)] }), { steps: 7, seconds: 0.7 });
  assert.deepEqual(moving.outer, ["step 3/4"]);
  assert.deepEqual([moving.bars[0].rate, moving.behind], ["10.0 it/s", "0.7 s behind"]);
  const still = row(a_rank(1, { progress: [a_bar(25)] }), null, null, true);
  assert.deepEqual([still.bars[0].rate, still.bars[0].left], ["", ""]);
  const cpu = row(a_rank(1, { device: "cpu", gpu_memory_bytes: null, rss_bytes: 5e8, cpu_percent: 98.4 }), null);
  assert.deepEqual([cpu.device, cpu.memory, cpu.busy], ["cpu", "500.0 MB", "98 %"]);
});

test("the bar and the time that is left are the outermost loop's, and do not change between two rounds of the inner one", () => {
  const epoch = (step, rate) => a_bar(step, { label: "epoch", total: 14, rate });
  const batch = (step) => a_bar(step, { label: "batch", total: 11, rate: 25.6 });
  const said = (...progress) => row(a_rank(0, { progress }), null);
  const inside = said(epoch(8, 0.5), batch(11));
  assert.deepEqual([inside.outer, inside.bars[0].steps, inside.bars[0].rate, inside.bars[0].left], [["epoch 8/14"], "11/11", "", "0:10 left"]);
  assert.deepEqual([inside.bars[0].fraction, inside.bars[0].hair, inside.bars[0].percent], [9 / 14, 1, "64 %"]);
  assert.equal(runLeft(a_run(a_rank(0, { progress: [epoch(8, 0.5), batch(11)] }), a_rank(1, { progress: [epoch(7, 0.5), batch(0)] }))), "0:14 left", "of the rank that needs longest");
  assert.equal(runLeft({ ...a_run(a_rank(0, { progress: [epoch(8, 0.5)] })), stall: golden.stall ?? {} }), "");
  assert.equal(Math.round(secondsLeft([epoch(0, null), batch(0)])), 6, "before the first epoch has ended, by the pace of batches");
  assert.equal(secondsLeft([a_bar(3, { total: null })]), null);

  const between = steadyLoops([epoch(8, 0.5), batch(11)], [epoch(9, 0.5)]);
  assert.deepEqual([between.length, between[1].step], [2, 0]);
  assert.equal(said(...between).bars[0].fraction, 9 / 14, "neither back nor forth");
  assert.equal(steadyLoops([epoch(13, 0.5), batch(11)], [epoch(14, 0.5)]).length, 1, "the end");
  assert.equal(steadyLoops([epoch(8, 0.5), batch(11)], [a_bar(1, { label: "test" })]).length, 1, "another loop");
  assert.equal(steadyLoops(undefined, [epoch(1, 1)]).length, 1);
});

test("a row says how many metrics it does not show, those that were not sent too", () => {
  const metrics = Object.fromEntries([1, 2, 3, 4, 5].map((number) => [`m${number}`, number]));
  const said = row(a_rank(0, { metrics, unsent_metrics: 3 }), null);
  assert.deepEqual(firstMetrics(said, 4).map(([name, value]) => name || value), ["m1", "m2", "m3", "m4", "4 more"]);
  assert.deepEqual(firstMetrics(said, Infinity).at(-1), ["", "3 more"]);
  assert.equal(firstMetrics(row(a_rank(0, { metrics }), null), Infinity).length, 5);
});

// ------------------------------------------------------------------------------------------------ output

test("only exactly equal lines of several ranks are one", () => {
  const folded = fold([line(0, "a"), line(1, "a"), line(0, "b"), line(1, "b "), line(0, "c"), line(1, "c", { stream: "stderr" })]);
  assert.deepEqual(folded.map((each) => [each.text, each.ranks]), [["a", [0, 1]], ["b", [0]], ["b ", [1]], ["c", [0]], ["c", [1]]]);
  assert.equal(whose([0, 1, 2, 3], state()), "all 4");
  assert.equal(whose([0, 1], state()), "0-1");
});

test("folding keeps the order of every rank", () => {
  const texts = ["abacadbbc", "bacabdcab", "ccabbaadc"];
  const folded = fold(texts.flatMap((text, rank) => [...text].map((letter) => line(rank, letter))));
  texts.forEach((text, rank) => {
    assert.equal(folded.filter((each) => each.ranks.includes(rank)).map((each) => each.text).join(""), text);
  });
});

test("gaps next to each other are one, and nothing is folded across them", () => {
  const gap = { rank: null, stream: "stdout", text: "", skipped: 5 };
  const folded = fold([line(0, "a"), gap, { ...gap, skipped: 2 }, line(1, "a")]);
  assert.deepEqual(folded.map((each) => each.skipped || each.text), ["a", 7, "a"]);
});

// ------------------------------------------------------------------------------------------------ charts

const charted = (...columns) => a_run(...columns.map((each, rank) => a_rank(rank, { columns: each })));

test("a chart has a line for each rank, within its box", () => {
  const run = charted({ step: [0, 10], "=loss": [2, 1], "=lr": [1, 1] }, { step: [0, 10], "=loss": [3, 0] }, null);
  assert.deepEqual(chartNames(run), ["loss"]);
  const chart = chartOf(run, "loss");
  assert.deepEqual(chart.lines.map(({ path }) => path), ["M4.0 34.0L296.0 62.0", "M4.0 6.0L296.0 90.0"]);
  assert.equal(chart.first, 0);
  assert.deepEqual(valuesAt(chart.series[0], 5), [{ rank: 0, value: 2 }, { rank: 1, value: 3 }]);
  assert.equal(Math.round(chart.x.back(BOX.width / 2)), 5);
});

test("what is not a number is left out and named", () => {
  const chart = chartOf(charted({ step: [0, 1, 2, 3], "=loss": [1, "nan", null, 2] }), "loss");
  assert.equal(chart.series[0].odd, null, "the kernel tells since when");
  assert.equal(chart.lines[0].points.length, 2);
});

test("the largest numbers there are do not break a chart", () => {
  const chart = chartOf(charted({ step: [0, 1], "=loss": [-1.7e308, 1.7e308] }), "loss");
  assert.equal(chart.lines[0].path, "M4.0 90.0L296.0 6.0");
});

const OPTIONS = [{ step: [0, 10, 100], at: [1, 2, 3], "=train/loss": [10, 1, 0.1], "=val/loss": [null, 2, 0.2] }];

test("metrics of training and of validation are one chart", () => {
  const grouped = chartGroups(["train/loss", "lr", "val/loss", "val_accuracy", "loss_train"]);
  assert.deepEqual(grouped, [
    { title: "loss", names: ["train/loss", "val/loss", "loss_train"] },
    { title: "lr", names: ["lr"] },
    { title: "val_accuracy", names: ["val_accuracy"] },
  ]);
  const { series } = chartOf(charted(...OPTIONS), ["train/loss", "val/loss"]);
  assert.deepEqual(series.map(({ lines }) => lines[0].points.length), [3, 2]);
});

test("a chart has a logarithmic scale, time below it, and a part of it", () => {
  const run = charted(...OPTIONS);
  assert.equal(chartOf(run, "train/loss", { log: true }).lines[0].path, "M4.0 6.0L33.2 48.0L296.0 90.0");
  assert.equal(chartOf(run, "train/loss", { time: true }).lines[0].path.split("L").length, 3);
  assert.equal(chartOf(run, "train/loss", { time: true }).x.high, 3);
  assert.deepEqual(chartOf(run, "train/loss", { zoom: [5, 200] }).lines[0].points.map(([x]) => x), [10, 100]);
});

test("smoothing weighs what came before", () => {
  assert.deepEqual(smoothed([[0, 1, 0], [1, 2, 1]], 0), [[0, 1, 0], [1, 2, 1]]);
  const [first, second] = smoothed([[0, 1, 0], [1, 2, 1]], 0.5);
  assert.equal(first[1], 1);
  assert.equal(second[1].toFixed(3), "1.667");
});

test("many ranks are a mean and a band", () => {
  const ranks = Array.from({ length: 9 }, (_, rank) => ({ step: [0, 10], "=loss": [rank, 2 * rank] }));
  const [{ mean, band, lines }] = chartOf(charted(...ranks), "loss").series;
  assert.equal(mean, "M4.0 69.0L296.0 48.0");
  assert.equal(band, "M4.0 90.0L296.0 90.0L296.0 6.0L4.0 48.0Z");
  assert.equal(lines[0].path, "");
});

const TURNED = { step: [0, 1, 2, 3, 4], "=loss": [2, 1.5, 1, "nan", "nan"], not_finite: { loss: ["nan", 3, 4, true] } };

test("a line that became nan has a cross there, and says since when", () => {
  const chart = chartOf(charted(TURNED, { step: [0, 1, 2, 3, 4], "=loss": [3, 2.5, 2, 1.5, 1] }), "loss");
  const { odd } = chart.series[0];
  assert.deepEqual([odd.text, odd.word, odd.at], ["nan from step 3 on rank 0", "nan", 3]);
  const [left, top] = crossOf(chart, chart.series[0]);
  assert.deepEqual([left * BOX.width, top * BOX.height], [chart.x.at(3), chart.y.at(1)], "where it was last before");
  assert.equal(chart.x.high, 4);
  assert.equal(chartText("loss", chart), "loss, rank 0 fell from 2 to 1 in 2 steps, nan from step 3 on rank 0");

  const only = chartOf(charted(TURNED), "loss");
  assert.deepEqual([only.series[0].odd.text, only.x.high], ["nan from step 3", 3], "the axis goes on to where it turned");
  const recovered = { ...TURNED, not_finite: { loss: ["inf", 3, 5, false] } };
  const { odd: once } = chartOf(charted(recovered), "loss").series[0];
  assert.deepEqual([once.text, once.word], ["inf at steps 3-5", ""]);
});

test("axes have three ticks, and a chart says its numbers and its best value", () => {
  const chart = chartOf(charted({ step: [0, 5, 10, 20], "=val/loss": [4, 1, 0.5, 2] }), "val/loss");
  assert.deepEqual(ticks(chart.x, BOX.left, BOX.width - BOX.right), [0, 10, 20]);
  assert.deepEqual(ticks(chart.y, BOX.height - BOX.bottom, BOX.top), [0.5, 2.25, 4]);
  assert.deepEqual(chart.series[0].best, [10, 0.5, 10]);
  assert.equal(chartText("val/loss", chart), "val/loss fell from 4 to 2 in 20 steps, best 0.5 at step 10");
  const log = chartOf(charted({ step: [0, 1], "=loss": [100, 1] }), "loss", { log: true });
  assert.deepEqual(ticks(log.y, BOX.height - BOX.bottom, BOX.top).map((each) => Math.round(each)), [1, 10, 100]);
});

test("smoothing is offered for a line that goes up and down", () => {
  const line = (of) => Array.from({ length: 40 }, (_, step) => [step, of(step), step]);
  assert.ok(isNoisy(line((step) => 1 / (step + 1) + (step % 2) / 4)));
  assert.ok(!isNoisy(line((step) => 1 / (step + 1))));
  assert.ok(!isNoisy(line(() => 1).slice(0, 5)));
});

test("a metric may be called like something that every object has", () => {
  for (const name of ["constructor", "__proto__", "toString"]) {
    const columns = { step: [0, 1], [`=${name}`]: [2, 1], not_finite: {} };
    const state = { ranks: [{ rank: 0, state: "running", columns }] };
    assert.deepEqual(chartNames(state), [name]);
    assert.equal(chartOf(state, name).series[0].odd, null);
    assert.deepEqual(oddsOfEach(state, name), []);
    const metrics = JSON.parse(`{"${name}": "nan"}`);
    assert.deepEqual(row({ ...golden.ranks[0], metrics, columns }, null).metrics, [[name, "nan"]]);
  }
});

for (const [name, expected] of JSON.parse(readFileSync(new URL("../../record/golden_direction.json", import.meta.url)))) {
  test(`which values of ${name} are better`, () => assert.equal(direction(name), expected));
}

const close = (found, expected) => found.length === expected.length && found.every((each, place) => Math.abs(each - expected[place]) < 1e-9);

for (const { name, lines, ended, means: expected } of JSON.parse(readFileSync(new URL("../../record/golden_mean.json", import.meta.url)))) {
  test(`the mean of many ranks: ${name}`, () => {
    const found = means(Object.entries(lines).map(([rank, points]) => ({ ended: ended.includes(Number(rank)), points: points.map(([step, value]) => [step, value, step]) })));
    assert.equal(found.length, expected.length);
    found.forEach(({ step, mean, low, high }, place) => assert.ok(close([step, mean, low, high], expected[place]), `${step} ${mean}`));
  });
}

test("the mean of ranks that keep points of their own is where all are", () => {
  const of = (rank) => Array.from({ length: 200 }, (_, step) => step).filter((step) => step % (1 + (rank % 5)) === 0 && step < 200 - rank);
  const ranks = Array.from({ length: 64 }, (_, rank) => ({ step: of(rank), "=loss": of(rank).map((step) => 1 / (step + 1) + 0.01 * rank) }));
  const { x, y, series: [{ mean, points }] } = chartOf(charted(...ranks), "loss");
  const read = mean.slice(1).split("L").map((pair) => pair.split(" ").map(Number));
  assert.equal(points.at(-1)[2], x.high);
  assert.ok(read.every(([, down], place) => place === 0 || down >= read[place - 1][1]), "a falling series falls");
  points.forEach(([step, value], place) => {
    assert.ok(step < 10 || Math.abs(value - (1 / (step + 1) + 0.315)) < 0.04, `${step}: ${value}`); // before, the mean is interpolated on a steep curve
    assert.ok(Math.abs(y.at(value) - read[place][1]) < 0.06);
  });
});

// ------------------------------------------------------------------------------------------------ colours, clearing

test("a rank's clear_output takes its lines of that stream away, and nobody else's", () => {
  const logs = new Logs();
  const entries = [line(0, "old"), line(1, "stays"), line(0, "error", { stream: "stderr" }), line(0, "", { cleared: true }), line(0, "new")];
  logs.take(pieces(0, [[0, entries]]));

  assert.deepEqual(logs.all.map((each) => each.text), ["stays", "error", "new"]);
  assert.deepEqual(logs.of(0).map((each) => each.text), ["error", "new"]);
});

test("the colours of a line are its parts, and a text that was cut has fewer", () => {
  const spans = [[2, 5, "B f1"], [5, 90, "b4 f#ff8800"]];
  assert.deepEqual(partsOf({ text: "a red and more", spans }), [
    { text: "a ", css: "" },
    { text: "red", css: "color: var(--jd-ansi-1); font-weight: bold" },
    { text: " and more", css: "background-color: var(--jd-ansi-4); color: #ff8800" },
  ]);
  assert.deepEqual(partsOf({ text: "a", spans }), [{ text: "a", css: "" }]);
  assert.deepEqual(partsOf({ text: "x", spans: [[0, 1, "f#url(x)"]] }), [{ text: "x", css: "color: var(--jd-ansi-NaN)" }]);
});

// ------------------------------------------------------------------------------------------------ searching

test("lines are found by words and by trouble, and logs stand line by line beside one another", () => {
  const errors = { search: "", errors: true };
  assert.ok(matches(line(0, "Step 2"), { search: "STEP", errors: false }));
  assert.ok(matches(line(0, "ValueError: x"), errors));
  assert.ok(matches(line(0, "loading", { stream: "stderr" }), errors));
  assert.ok(!matches(line(0, "no terror here"), errors));
  assert.deepEqual(interleave([["a", "b"], [], ["c", "d", "e"]]), ["a", "c", "b", "d", "e"]);
});
