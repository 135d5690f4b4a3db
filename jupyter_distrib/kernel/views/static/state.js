// What the view of a run says, without any DOM: pieces in, words and orders out. Pure functions, tested under node.
//
// A *state* is what `state_of` gives in Python (tests/kernel/record/golden_run_state.json); the kernel sends it in pieces
// (`pieces.py`), which `assemble` puts together. Numbers that JSON does not know are "nan", "inf" and "-inf".

import { t, tn } from "./say.js";
import { aligned, amount, clock, notFiniteText, ownValue, rankList, ranksOf, size, steady } from "./words.js";

const DISPLAYS_KEPT = 100;

export const FINISHED = new Set(["done", "failed", "lost", "interrupted"]);
export const GLYPHS = {
  waiting: "○", starting: "◌", running: "●", done: "✓", failed: "✗", lost: "✗", interrupted: "■",
};

/** The state of a rank in the user's language. */
export function stateName(state) {
  const names = {
    waiting: t("waiting"), starting: t("starting"), running: t("running"), done: t("done"), failed: t("failed"), lost: t("lost"),
    interrupted: t("interrupted"),
  };
  return names[state] ?? state;
}

/** The state that the pieces of a model hold; null before the first has come. */
export function assemble(get) {
  const head = get("head");
  if (!head) return null;
  const ranks = head.numbers.map((number) => {
    const row = get(`rank_${number}`);
    const { first, count } = row.shown;
    const displays = [];
    for (let index = first; index < first + count; index += 1) {
      const piece = get(`display_${number}_${index % DISPLAYS_KEPT}`);
      if (piece && piece.index === index) displays.push(piece);
    }
    return { ...row, displays, skipped_displays: first, unfinished: row.unfinished ?? [], columns: get(`history_${number}`) ?? null };
  });
  return { ...head, ranks, course: get("course") ?? null };
}

// ------------------------------------------------------------------------------------------------ the run

/** `8 ranks · ddp · local · 2 × A100`; the clock is beside it. */
export function title(state) {
  const count = state.ranks.length;
  const ranks = count === state.world_size
    ? tn("%1 rank", "%1 ranks", count)
    : t("%1 of %2", rankList(state.numbers ?? state.ranks.map((rank) => rank.rank)), state.world_size);
  const strategy = state.strategy === "none" ? "" : state.strategy;
  return [ranks, strategy, state.pool, devices(state)].filter(Boolean).join(" · ");
}

function devices(state) {
  const counts = new Map();
  for (const rank of state.ranks) {
    const name = deviceName(rank.device_name) || rank.device.split(":")[0];
    if (name && name !== "cpu") counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  const names = [...counts].map(([name, count]) => `${count} × ${name}`);
  return names.join(", ") || (state.gpus ? "cuda" : "cpu");
}

export function deviceName(name) {
  return name.split(" (")[0].replace(/^NVIDIA /, "").split("-")[0].trim();
}

/** What the system has to say, each sentence once with the ranks it is about. */
export function notes(state) {
  const about = new Map(state.remark ? [[state.remark, []]] : []);
  for (const note of state.notes) {
    if (!about.has(note.text)) about.set(note.text, []);
    if (note.rank !== null) about.get(note.text).push(note.rank);
  }
  return [...about].map(([text, ranks]) => (ranks.length ? t("%1: %2", rankList(ranks), text) : text));
}

/** A text in parts, of which every second one is the address of a page (`_ADDRESS` in `html.py`). */
export function addressed(text) {
  return text.split(/(https?:\/\/[^\s<>"']*[^\s<>"'.,;:!?)])/);
}

/**
 * What went wrong, a sentence for all ranks of which the same is to be said: exceptions only if their tracebacks are exactly
 * equal. What only followed from it comes last.
 */
export function failures(state) {
  const groups = new Map();
  for (const rank of [...state.ranks].sort((a, b) => Number(follows(a)) - Number(follows(b)))) {
    const words = trouble(rank, state.cause);
    if (!words) continue;
    const own = rank.failure && !rank.consequence; // else it is a sentence on what became of the rank
    const story = `${own ? ":" : ""} ${words}${own && rank.failure.where ? ` ${t("at %1", rank.failure.where)}` : ""}`;
    const key = own ? rank.failure.traceback : story;
    if (!groups.has(key)) groups.set(key, { story, ranks: [] });
    groups.get(key).ranks.push(rank.rank);
  }
  const told = new Set();
  return [...groups.values()].map(({ story, ranks }) => {
    const all = ranks.length > 1 && ranks.length === state.ranks.length;
    const other = told.has(story) ? ` ${t("(another traceback)")}` : "";
    told.add(story);
    return `${all ? ranksOf(ranks.length) : rankList(ranks)}${story}${other}`;
  });
}

/** Where the ranks are while nothing moves, those that are not waiting for others first. */
export function places(stall) {
  const groups = new Map();
  for (const { rank, where, line, waiting } of [...stall.places].sort((a, b) => a.waiting - b.waiting)) {
    const text = `${where}${line === null ? "" : ` ${t("(line %1)", line)}`}`;
    if (!groups.has(text)) groups.set(text, { ranks: [], waiting });
    groups.get(text).ranks.push(rank);
  }
  return [...groups].map(([text, { ranks, waiting }]) => ({ text: ranks.length > 1 ? t("%1: each %2", rankList(ranks), text) : `${rankList(ranks)}: ${text}`, waiting }));
}

/** The stacks that somebody asked for, each once with the ranks that have it; none of ranks that have gone on to their end. */
export function stacks(state) {
  const groups = new Map();
  for (const { rank, state: now, stack } of state.ranks) {
    if (!stack || FINISHED.has(now)) continue;
    const key = JSON.stringify([stack.trouble, stack.lines]);
    if (!groups.has(key)) groups.set(key, { ranks: [], stack });
    groups.get(key).ranks.push(rank);
  }
  return [...groups.values()].map(({ ranks, stack }) => ({
    title: `${t("%1 at %2", rankList(ranks), clock(stack.seen_s))}${stack.trouble ? `: ${stack.trouble}` : ""}`,
    lines: stack.lines,
  }));
}

/** Whether a rank only stopped because of another one. */
function follows(rank) {
  return rank.consequence || rank.state === "interrupted" || (rank.state === "lost" && rank.exit?.asked) || false;
}

/** Why a rank did not reach its end; `cause` is the rank that failed first, if one did. */
export function trouble(rank, cause = null) {
  if ((rank.consequence || rank.state === "interrupted") && cause !== null && cause !== rank.rank) return t("stopped because of rank %1", cause);
  if (rank.consequence) return t("stopped because another rank was gone");
  if (rank.failure) {
    const name = rank.failure.type.split(".").pop();
    const message = rank.failure.message.trim();
    return message ? `${name}: ${message}` : name;
  }
  if (rank.state !== "lost" || !rank.exit) return "";
  if (rank.exit.asked) return rank.exit.reason || t("did not stop and was replaced");
  if (rank.exit.out_of_memory) return t("was killed by the system's out-of-memory killer");
  const code = rank.exit.code;
  if (code === null) return t("is gone");
  return code < 0 ? t("was killed by signal %1", -code) : t("left its process with status %1", code);
}

/** Where a stop that was asked for stands: a sentence, or nothing. */
export function stopping(state, asked) {
  if (!asked && !state.stopping) return "";
  const left = state.ranks.filter((rank) => !FINISHED.has(rank.state)).map((rank) => rank.rank);
  if (!left.length) return t("stopped");
  const where = (state.stall?.places ?? []).filter((place) => left.includes(place.rank));
  const places = where.length ? `: ${where.map((place) => t("rank %1 %2", place.rank, place.where)).slice(0, 3).join("; ")}` : "";
  return asked === "killed" || state.stopping === "killed"
    ? t("killing %1", rankList(left))
    : t("asked to stop; %1 still running", left.length === state.ranks.length ? t("all ranks") : rankList(left)) + places;
}

/** One sentence for those who cannot see the rows; changes only when a state does. */
export function summary(state, asked) {
  const counts = new Map();
  for (const rank of state.ranks) counts.set(rank.state, (counts.get(rank.state) ?? 0) + 1);
  const parts = [...counts].map(([name, count]) => `${count} ${stateName(name)}`);
  for (const text of failures(state).slice(0, 2)) parts.push(text.slice(0, 120));
  if (state.stall) parts.push(state.stall.text);
  return [...parts, stopping(state, asked)].filter(Boolean).join("; ");
}

// ------------------------------------------------------------------------------------------------ the ranks

/** How far each rank is behind the front one: rank -> `{steps, seconds}`, only those that are noticeably so. */
export function behind(state) {
  const moving = state.ranks.filter((rank) => rank.state === "running" && rank.progress.length);
  const late = new Map();
  if (!moving.length) return late;
  const deep = Math.min(...moving.map((rank) => rank.progress.length));
  // Those that have ended in the same loops stay at the front: whoever they have left behind is still as far back.
  const totals = (rank) => rank.progress.slice(0, deep).map(({ total }) => total);
  const ended = state.ranks.filter((rank) => FINISHED.has(rank.state) && rank.progress.length && totals(rank).every((total, level) => total !== null && total === totals(moving[0])[level]));
  if (moving.length + ended.length < 2) return late;
  const depth = Math.min(...[...moving, ...ended].map((rank) => rank.progress.length));
  const at = (rank) => position(rank.progress.slice(0, depth));
  const places = moving.map(at);
  const front = Math.max(...places, ...ended.map(at));
  const rates = moving.map((rank) => rank.progress[depth - 1].rate).filter((rate) => rate > 0).sort((a, b) => a - b);
  const rate = rates[Math.floor(rates.length / 2)];
  moving.forEach((rank, index) => {
    const steps = front - places[index];
    const seconds = rate ? steps / rate : null;
    if (seconds === null ? steps >= 5 : steps >= 2 && seconds >= 0.5) late.set(rank.rank, { steps, seconds });
  });
  return late;
}

/** One number for nested loops: steps of the innermost since the beginning. */
function position(bars) {
  return bars.reduce((place, bar) => place * (bar.total ?? 0) + bar.step, 0);
}

/** The loops of a rank between two rounds of its inner loop: those that were there before, begun again. */
export function steadyLoops(before, now) {
  const same = before && before.length > now.length && now.length && now.every(({ label, total }, level) => label === before[level].label && total === before[level].total);
  return same && now[0].total !== null && now[0].step < now[0].total ? [...now, ...before.slice(now.length).map((bar) => ({ ...bar, step: 0 }))] : now;
}

/** How far nested loops are, 0 to 1, the inner ones as parts of the outermost one's step; null if nobody knows. */
function wholeFraction(bars) {
  if (!bars.length || !bars[0].total) return null;
  const inner = bars.slice(1).reduceRight((share, { step, total }) => (total ? Math.min(1, (step + share) / total) : 0), 0);
  return Math.min(1, Math.max(0, (bars[0].step + (bars[0].step < bars[0].total ? inner : 0)) / bars[0].total));
}

/** The seconds until the outermost loop ends, by its pace, or before it has one by that of the innermost loop (`seconds_left` in `nested_progress.py`). */
export function secondsLeft(bars) {
  const fraction = wholeFraction(bars);
  if (fraction === null || fraction >= 1) return null;
  const [outer, inner] = [bars[0], bars[bars.length - 1]];
  if (outer.rate > 0) return ((1 - fraction) * outer.total) / outer.rate;
  const steps = bars.reduce((product, { total }) => product * (total ?? 0), 1);
  return inner.rate > 0 && steps ? ((1 - fraction) * steps) / inner.rate : null;
}

/** When the run ends, in words: that of the rank that needs longest; empty if nobody knows, or nothing moves. */
export function runLeft(state) {
  const left = state.stall ? [] : state.ranks.filter((rank) => rank.state === "running").map((rank) => secondsLeft(rank.progress)).filter((seconds) => seconds !== null);
  return left.length ? t("%1 left", clock(Math.round(Math.max(...left)))) : "";
}

export function behindText({ steps, seconds }) {
  return seconds === null ? tn("%2 step behind", "%2 steps behind", steps, amount(steps)) : t("%1 s behind", seconds < 10 ? seconds.toFixed(1) : Math.round(seconds));
}

/** The ranks in the order in which they matter: failed or lost, then those that are behind, then by number. */
export function order(state, late = behind(state)) {
  const bad = (rank) => rank.state === "failed" || rank.state === "lost";
  const weight = (rank) => (bad(rank) ? (rank.consequence ? -1e9 : -2e9) : -(late.get(rank.rank)?.steps ?? 0));
  return [...state.ranks].sort((a, b) => weight(a) - weight(b) || a.rank - b.rank);
}

/** What one row says: plain texts and fractions; of a run in which nothing moves no rate, and no time that is left. */
export function row(rank, late, cause = null, stalled = false) {
  return {
    rank: rank.rank,
    state: rank.state,
    device: rank.gpu_memory_bytes !== null || rank.device.startsWith("cuda") ? rank.device.replace("cuda:", "GPU ") : rank.device,
    ...usage(rank),
    strips: rank.strips ?? ["", ""],
    outer: rank.progress.slice(0, -1).map((bar) => barOf(bar, false)).map(({ label, steps }) => `${label} ${steps}`.trim()),
    bars: barsOf(rank.progress, rank.state === "running" && !stalled),
    metrics: Object.entries(rank.metrics).map(([name, value]) => [name, numberOrSince(rank, name, value)]),
    unsent: rank.unsent_metrics ?? 0,
    last: rank.last_line,
    trouble: trouble(rank, cause),
    behind: late ? behindText(late) : "",
  };
}

/** `0.4113`, `nan from step 31`. */
function numberOrSince(rank, name, value) {
  const odd = ownValue(rank.columns?.not_finite, name);
  return typeof value === "string" && odd?.[3] ? notFiniteText(odd) : aligned(value);
}

/** The first metrics of a row, and how many more there are. */
export function firstMetrics({ metrics, bars, unsent }, most) {
  const all = metrics.length ? metrics : bars.filter((bar) => bar.detail).map((bar) => ["", bar.detail]);
  const more = Math.max(0, all.length - most) + unsent;
  return more ? [...all.slice(0, most), ["", tn("%1 more", "%1 more", more)]] : all;
}

/** What the rank's tensors take, as its framework counts, and how far the driver's figure is the rank's own. */
function ofTensors(rank) {
  const tensors = rank.gpu_tensor_bytes ?? null;
  const counted = tensors === null ? "" : t(", tensors %1, reserved for them %2", size(tensors), size(rank.gpu_reserved_bytes));
  return counted + (rank.gpu_memory_of_all ? t("; the driver lists no processes here, so GPU memory is what all have taken since the rank began") : "");
}

/** `6.4 GB` of `86 GB`, 75 % of the GPU; without one, resident memory and CPU. */
function usage(rank) {
  if (rank.gpu_memory_bytes !== null) {
    const total = rank.gpu_memory_total_bytes;
    const memory = total ? t("GPU memory %1 of %2", size(rank.gpu_memory_bytes), size(total)) : t("GPU memory %1", size(rank.gpu_memory_bytes));
    return {
      memory: size(rank.gpu_memory_bytes),
      memoryFraction: total ? rank.gpu_memory_bytes / total : null,
      busy: rank.gpu_percent === null ? "" : `${Math.round(rank.gpu_percent)} %`,
      usage: `${memory}${rank.gpu_percent === null ? "" : t(", GPU %1 % busy", Math.round(rank.gpu_percent))}${ofTensors(rank)}`,
    };
  }
  if (!rank.rss_bytes) return { memory: "", memoryFraction: null, busy: "", usage: "" };
  const busy = `${Math.round(rank.cpu_percent)} %`;
  return { memory: size(rank.rss_bytes), memoryFraction: null, busy, usage: t("memory %1, CPU %2", size(rank.rss_bytes), busy) };
}

/** One bar for all loops of a rank: how far the outermost one is, and as a hairline the innermost; its words and pace are those of the innermost, the time left is the outermost one's. */
function barsOf(bars, running) {
  if (bars.length < 2) return bars.map((bar) => ({ ...barOf(bar, running), hair: null }));
  const [whole, inner, left] = [wholeFraction(bars), barOf(bars[bars.length - 1], running), running ? secondsLeft(bars) : null];
  return [{ ...inner, fraction: whole ?? inner.fraction, hair: whole === null ? null : inner.fraction, percent: whole === null ? inner.percent : `${Math.floor(100 * whole)} %`, left: left === null ? "" : t("%1 left", clock(Math.round(left))) }];
}

function barOf(bar, running) {
  const steps = bar.total === null ? amount(bar.step) : `${amount(bar.step)}/${amount(bar.total)}`;
  const finished = bar.total !== null && bar.step >= bar.total;
  const rate = running && bar.rate > 0 && !finished ? bar.rate : null;
  return {
    label: bar.label,
    steps,
    width: bar.total === null ? 0 : bar.label.length + 2 * amount(bar.total).length + 2,
    fraction: bar.total ? Math.min(1, Math.max(0, bar.step / bar.total)) : null,
    percent: bar.total ? `${Math.floor((100 * bar.step) / bar.total)} %` : amount(bar.step),
    rate: rate === null ? "" : rate >= 1 ? `${steady(rate)} ${bar.unit}/s` : `${steady(1 / rate)} s/${bar.unit}`,
    left: rate === null || !bar.total ? "" : t("%1 left", clock((bar.total - bar.step) / rate)),
    detail: bar.detail,
  };
}
