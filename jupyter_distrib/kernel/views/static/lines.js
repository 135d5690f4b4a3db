// What ranks print, as data: the lines that have come, and equal lines of several ranks as one. No DOM; tested under node.

import { t } from "./say.js";
import { spans } from "./words.js";

const CHUNKS = 24;
const KEPT_LINES = 1000; // of each rank, here in the browser
const FOLD_WINDOW = 64;

/** The lines that have come, of all ranks together and of each one; keeps more of them than the kernel does. */
export class Logs {
  constructor() {
    this.all = [];
    this.byRank = new Map();
    this.next = 0; // number of the entry that comes next
    this.changes = 0;
  }

  take(get, size = 50) {
    const chunks = [];
    for (let place = 0; place < CHUNKS; place += 1) {
      const piece = get(`lines_${place}`);
      if (piece && (piece.chunk + 1) * size > this.next) chunks.push(piece);
    }
    for (const { chunk, entries } of chunks.sort((a, b) => a.chunk - b.chunk)) {
      const first = chunk * size;
      if (first > this.next) this.add({ rank: null, stream: "stdout", text: "", skipped: first - this.next });
      for (const entry of entries.slice(Math.max(0, this.next - first))) this.add(entry);
      this.next = Math.max(this.next, first + entries.length);
    }
  }

  add(entry) {
    this.changes += 1;
    if (entry.cleared) return this.clear(entry);
    push(this.all, entry);
    if (entry.rank === null) for (const lines of this.byRank.values()) push(lines, entry);
    else push(this.of(entry.rank), entry);
  }

  /** A rank has cleared what it had written to a stream. */
  clear({ rank, stream }) {
    const stays = (line) => line.rank !== rank || line.stream !== stream;
    this.all = this.all.filter(stays);
    this.byRank.set(rank, this.of(rank).filter(stays));
  }

  of(rank) {
    if (!this.byRank.has(rank)) this.byRank.set(rank, []);
    return this.byRank.get(rank);
  }
}

function push(lines, entry) {
  lines.push(entry);
  if (lines.length > 2 * KEPT_LINES) lines.splice(0, KEPT_LINES);
}

/** `all 8`, `0-3, 5`: whose line it is. */
export function whose(ranks, state) {
  return ranks.length > 1 && ranks.length === state.ranks.length ? t("all %1", ranks.length) : spans(ranks);
}

/** Words of lines that tell of trouble, whatever wrote them. */
const TROUBLE = /\b(error|exception|traceback|warning|fatal|failed)\b|Error:/i;

/** Whether a line is one that is looked for; `search` is anywhere in it, in capitals or not. */
export function matches({ text, stream }, { search, errors }) {
  return (!errors || stream === "stderr" || TROUBLE.test(text)) && text.toLowerCase().includes(search.toLowerCase());
}

/** The lines of several logs as one list: the first line of each, then the second; each log keeps its order. */
export function interleave(logs) {
  const longest = Math.max(0, ...logs.map((lines) => lines.length));
  return Array.from({ length: longest }, (_, place) => logs.flatMap((lines) => lines.slice(place, place + 1))).flat();
}

/**
 * Put together what several ranks wrote exactly alike, near to each other; the order of each single rank is kept.
 * Ranks send their lines in batches, so equal lines are rarely direct neighbours. `first` is the line as it came.
 */
export function fold(lines) {
  const folded = [];
  for (const line of lines) {
    const last = folded[folded.length - 1];
    if (line.skipped) {
      if (last && last.skipped) last.skipped += line.skipped;
      else folded.push({ ...line, first: line, ranks: [] });
      continue;
    }
    const place = equalPlace(folded, line);
    if (place === null) folded.push({ ...line, first: line, ranks: [line.rank] });
    else join(folded, place, line.rank);
  }
  return folded;
}

/** The first equal line near the end that this rank may still join: after the last one that it shares. */
function equalPlace(folded, line) {
  let place = null;
  for (let index = folded.length - 1; index >= Math.max(0, folded.length - FOLD_WINDOW); index -= 1) {
    const other = folded[index];
    const mine = other.ranks.includes(line.rank);
    if (other.skipped || (mine && other.ranks.length > 1)) break;
    if (!mine && other.text === line.text && other.stream === line.stream) place = index;
  }
  return place;
}

/** Add the rank to a line; what it alone wrote before this line goes in front of it. */
function join(folded, place, rank) {
  const rest = folded.splice(place);
  rest[0].ranks.push(rank);
  const own = rest.filter((line, index) => index > 0 && line.ranks.includes(rank));
  folded.push(...own, ...rest.filter((line) => !own.includes(line)));
}
