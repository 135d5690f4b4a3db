// Numbers and lists of ranks in words. No DOM; tested under node.

import { t, tn } from "./say.js";

/** @type {[string, number][]} */
const LETTERS = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
/** @type {[string, number][]} */
const UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

/** `0:41`, `1:02:03`. */
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** `45`, `1.5`, `12.3k`, `629M`. */
export function amount(number) {
  for (const [letter, factor] of LETTERS) {
    if (number >= 10 * factor || (number >= factor && letter !== "k")) return digits(number / factor, 3) + letter;
  }
  return Number.isInteger(number) ? String(number) : number >= 100 ? String(Math.trunc(number)) : digits(number, 3);
}

export function size(bytes) {
  for (const [unit, factor] of UNITS) {
    if (bytes >= factor) return `${(bytes / factor).toFixed(1)} ${unit}`;
  }
  return tn("%1 byte", "%1 bytes", bytes);
}

/** At most so many digits, without trailing zeros; "nan" and "inf" as they are. */
export function digits(value, count = 4) {
  if (typeof value === "string") return value;
  const large = Math.abs(value);
  if (value !== 0 && (large < 1e-3 || large >= 1e7)) return value.toExponential(count - 1).replace(/\.?0+e/, "e");
  return large >= 10 ** count ? value.toFixed(0) : String(Number(value.toPrecision(count)));
}

/** The same, but as long as its neighbours: numbers under one another are compared. */
export function aligned(value) {
  const plain = typeof value === "number" && !Number.isInteger(value) && Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4;
  return plain ? value.toPrecision(4) : digits(value);
}

/** The same as `amount`, always with three digits, so that what stands behind a number does not move. */
export function steady(number) {
  const [letter, factor] = LETTERS.find(([, each]) => number >= each) ?? ["", 1];
  const value = Number((number / factor).toPrecision(3)); // 9.999 is 10.0
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2) + letter;
}

/** `0-3, 5`. */
export function spans(ranks) {
  const runs = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([first, last]) => (last > first ? `${first}-${last}` : `${first}`)).join(", ");
}

export function rankList(ranks) {
  return tn("rank %2", "ranks %2", ranks.length, spans(ranks));
}

/** `all 4 ranks`. */
export function ranksOf(count) {
  return tn("all %1 rank", "all %1 ranks", count);
}

/** The value that an object itself has by this name, which a rank may have chosen: every object has a `constructor`. */
export function ownValue(object, name) {
  return object && Object.hasOwn(object, name) ? object[name] : undefined;
}

/** `nan from step 31`, `nan at steps 12-20` (`text` in `kernel/record/not_finite.py`). */
export function notFiniteText([word, first, last, isNow]) {
  if (isNow) return t("%1 from step %2", word, first);
  return last > first ? t("%1 at steps %2-%3", word, first, last) : t("%1 at step %2", word, first);
}

const LARGER_IS_BETTER = /^(acc|auc|f1|precision|recall|reward|score|bleu|iou)/;
const SMALLER_IS_BETTER = /^(loss|err|perplexity|ppl|nll|mse|mae|rmse|cost)/;

/** 1 if larger values are better, -1 if smaller ones are, 0 if the name does not tell (`kernel/analysis/best_value.py`). */
export function direction(name) {
  const word = name.toLowerCase().replace(/[/_.-](train(ing)?|val(id(ation)?)?|eval|test)$/, "").split(/[/_.\-\s]+/).pop();
  return LARGER_IS_BETTER.test(word) ? 1 : SMALLER_IS_BETTER.test(word) ? -1 : 0;
}
